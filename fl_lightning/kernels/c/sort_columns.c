/* The values of every column in increasing order: a network of exchanges on many columns at once. */

#include <stdint.h>

#define COLUMNS 64

#define SORT(NAME, REAL)                                                                          \
    static inline void NAME##_exchange(REAL *restrict low, REAL *restrict high) {                 \
        for (int j = 0; j < COLUMNS; j++) {                                                       \
            const REAL a = low[j], b = high[j];                                                   \
            low[j] = a < b ? a : b;                                                               \
            high[j] = a < b ? b : a;                                                              \
        }                                                                                         \
    }                                                                                             \
                                                                                                  \
    void NAME(const REAL *block, int64_t n, int64_t width, const int32_t *pairs,                  \
              int64_t num_pairs, int64_t first, int64_t end, REAL *restrict values,               \
              REAL *restrict out) {                                                               \
        for (int64_t begin = 0; begin < width; begin += COLUMNS) {                                \
            const int64_t here = width - begin < COLUMNS ? width - begin : COLUMNS;               \
            for (int64_t i = 0; i < n; i++)                                                       \
                for (int64_t j = 0; j < here; j++)                                                \
                    values[i * COLUMNS + j] = block[i * width + begin + j];                       \
            for (int64_t k = 0; k < num_pairs; k++)                                               \
                NAME##_exchange(values + COLUMNS * pairs[2 * k],                                  \
                                values + COLUMNS * pairs[2 * k + 1]);                             \
            for (int64_t i = first; i < end; i++)                                                 \
                for (int64_t j = 0; j < here; j++)                                                \
                    out[(i - first) * width + begin + j] = values[i * COLUMNS + j];               \
        }                                                                                         \
    }

SORT(sort_float32, float)
SORT(sort_float64, double)
