/* One step of SGD with momentum on some entries of a tensor, in one pass over the memory.

   Every product and sum is one fused operation, as in torch's kernels of `add` with a factor, so
   that the bits are those of `torch.optim.SGD`. */

#include <math.h>
#include <stdint.h>

#define SGD(NAME, REAL, FMA)                                                                     \
    void NAME(REAL *restrict p, const REAL *restrict g, const int64_t *restrict active,          \
              REAL *restrict buffer, int64_t k, double lr, double momentum, double dampening,    \
              double weight_decay, int nesterov, int maximize) {                                 \
        const REAL step = (REAL)-lr, kept = (REAL)momentum, taken = (REAL)(1 - dampening);       \
        const REAL decay = (REAL)weight_decay;                                                   \
        for (int64_t i = 0; i < k; i++) {                                                        \
            const int64_t j = active[i];                                                         \
            REAL d = maximize ? -g[j] : g[j];                                                    \
            if (weight_decay != 0) d = FMA(p[j], decay, d);                                      \
            if (buffer) {                                                                        \
                buffer[i] = FMA(d, taken, buffer[i] * kept);                                     \
                d = nesterov ? FMA(buffer[i], kept, d) : buffer[i];                              \
            }                                                                                    \
            p[j] = FMA(d, step, p[j]);                                                           \
        }                                                                                        \
    }

SGD(sgd_float32, float, fmaf)
SGD(sgd_float64, double, fma)
