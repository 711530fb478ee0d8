/* Vectors of LANES numbers, 8 or 16, and loops that the compiler writes out. */

#ifndef FL_LIGHTNING_VECTORS_H
#define FL_LIGHTNING_VECTORS_H

#include <stdlib.h>
#include <string.h>

#ifndef LANES
#define LANES 8
#endif

typedef float vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int choice __attribute__((vector_size(sizeof(vector)))); /* of numbers: -1 where so, else 0 */

#define INLINE static inline __attribute__((always_inline))

/* Before a loop of a constant count. clang takes gcc's word for it too late: what the loop indexes would
 * lie in memory, not in registers. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 36")
#endif

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

INLINE vector chosen(vector v, choice which) { return (vector)((choice)v & which); }

INLINE long rounded(long count) { return (count + LANES - 1) / LANES * LANES; }

/* Memory for so many numbers, that begins where a line of the cache does; NULL if there is none. */
INLINE float *room(long count) {
    return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
}

#endif
