/* Small matrix products in registers, for layers of few examples and few channels.
 *
 * At most twelve vectors of eight numbers are summed at a time, in `rows` rows of `vectors` each, both
 * of them constants where a block is compiled: `CASES` chooses among these.
 */

#ifndef FL_LIGHTNING_SMALL_PRODUCTS_H
#define FL_LIGHTNING_SMALL_PRODUCTS_H

#include <stdlib.h>
#include <string.h>

typedef float vector __attribute__((vector_size(32)));

#define LANES 8
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 12")

INLINE vector load(const float *from) {
    vector v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, vector v) { memcpy(to, &v, sizeof v); }

INLINE long rounded(long count) { return (count + LANES - 1) / LANES * LANES; }

/* Memory for so many numbers, that begins where a line of the cache does; NULL if there is none. */
INLINE float *room(long count) {
    return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64);
}

/* sums[r][v] += a[r * a_row] * b[8 v .. + 8] */
INLINE void product(const int rows, const int vectors, vector sums[12], const float *a, long a_row,
                    const float *b) {
    vector right[3];
    UNROLL for (int v = 0; v < vectors; v++) right[v] = load(b + v * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
        const float left = a[r * a_row];
        UNROLL for (int v = 0; v < vectors; v++) sums[r * vectors + v] += left * right[v];
    }
}

/* sums[r][v] += sum over i < count of a[r * a_row + i * a_step] * b[i * b_step + 8 v .. + 8] */
INLINE void products(const int rows, const int vectors, vector sums[12], long count, const float *a,
                     long a_row, long a_step, const float *b, long b_step) {
    for (long i = 0; i < count; i++)
        product(rows, vectors, sums, a + i * a_step, a_row, b + i * b_step);
}

/* How many of `count` to do next, if at most `most` go at once and all turns are about alike. */
INLINE long turn(long count, long most) {
    const long turns = (count + most - 1) / most;
    return (count + turns - 1) / turns;
}

#define ROWS(vectors) ((vectors) == 1 ? 12 : (vectors) == 2 ? 6 : 4)

/* Calls `block(rows, vectors, …)` with constants. */
#define CASES_3(block, ...)                                                                        \
    switch (rows) {                                                                                \
    case 1: block(1, 3, __VA_ARGS__); break;                                                       \
    case 2: block(2, 3, __VA_ARGS__); break;                                                       \
    case 3: block(3, 3, __VA_ARGS__); break;                                                       \
    default: block(4, 3, __VA_ARGS__);                                                             \
    }
#define CASES_2(block, ...)                                                                        \
    switch (rows) {                                                                                \
    case 1: block(1, 2, __VA_ARGS__); break;                                                       \
    case 2: block(2, 2, __VA_ARGS__); break;                                                       \
    case 3: block(3, 2, __VA_ARGS__); break;                                                       \
    case 4: block(4, 2, __VA_ARGS__); break;                                                       \
    case 5: block(5, 2, __VA_ARGS__); break;                                                       \
    default: block(6, 2, __VA_ARGS__);                                                             \
    }
#define CASES_1(block, ...)                                                                        \
    switch (rows) {                                                                                \
    case 1: block(1, 1, __VA_ARGS__); break;                                                       \
    case 2: block(2, 1, __VA_ARGS__); break;                                                       \
    case 3: block(3, 1, __VA_ARGS__); break;                                                       \
    case 4: block(4, 1, __VA_ARGS__); break;                                                       \
    case 5: block(5, 1, __VA_ARGS__); break;                                                       \
    case 6: block(6, 1, __VA_ARGS__); break;                                                       \
    case 7: block(7, 1, __VA_ARGS__); break;                                                       \
    case 8: block(8, 1, __VA_ARGS__); break;                                                       \
    case 9: block(9, 1, __VA_ARGS__); break;                                                       \
    case 10: block(10, 1, __VA_ARGS__); break;                                                     \
    case 11: block(11, 1, __VA_ARGS__); break;                                                     \
    default: block(12, 1, __VA_ARGS__);                                                            \
    }
#define CASES(block, ...)                                                                          \
    switch (vectors) {                                                                             \
    case 1: CASES_1(block, __VA_ARGS__) break;                                                     \
    case 2: CASES_2(block, __VA_ARGS__) break;                                                     \
    default: CASES_3(block, __VA_ARGS__)                                                           \
    }

#endif
