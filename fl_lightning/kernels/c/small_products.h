/* Small matrix products in registers, for layers of few examples and few channels.
 *
 * At most MOST vectors are summed at a time, which leaves registers for the factors, in `rows` rows of
 * `vectors` each, both of them constants where a block is compiled: `CASES` chooses among these.
 */

#ifndef FL_LIGHTNING_SMALL_PRODUCTS_H
#define FL_LIGHTNING_SMALL_PRODUCTS_H

#include "vectors.h"

#define MOST (LANES == 16 ? 24 : 12) /* processors with vectors of 16 have 32 registers, not 16 */

/* sums[r][v] += a[r * a_row] * b[LANES v .. + LANES] */
INLINE void product(const int rows, const int vectors, vector sums[MOST], const float *a, long a_row,
                    const float *b) {
    vector right[3];
    UNROLL for (int v = 0; v < vectors; v++) right[v] = load(b + v * LANES);
    UNROLL for (int r = 0; r < rows; r++) {
        const float left = a[r * a_row];
        UNROLL for (int v = 0; v < vectors; v++) sums[r * vectors + v] += left * right[v];
    }
}

/* sums[r][v] += sum over i < count of a[r * a_row + i * a_step] * b[i * b_step + LANES v .. + LANES] */
INLINE void products(const int rows, const int vectors, vector sums[MOST], long count, const float *a,
                     long a_row, long a_step, const float *b, long b_step) {
    for (long i = 0; i < count; i++)
        product(rows, vectors, sums, a + i * a_step, a_row, b + i * b_step);
}

/* How many of `count` to do next, if at most `most` go at once and all turns are about alike. */
INLINE long turn(long count, long most) {
    const long turns = (count + most - 1) / most;
    return (count + turns - 1) / turns;
}

/* As many rows as are summed at once with so many vectors each; with FEW_ROWS, with up to three. */
#define FEW_ROWS (MOST / 3)
#define ROWS(vectors) ((vectors) == 1 ? 12 : (vectors) == 2 ? MOST / 2 : FEW_ROWS)

#define CASE(r, v, block, ...)                                                                     \
    case r: block(r, v, __VA_ARGS__); break;
#define FROM_1(v, ...) CASE(1, v, __VA_ARGS__) CASE(2, v, __VA_ARGS__) CASE(3, v, __VA_ARGS__)
#define FROM_4(v, ...) CASE(4, v, __VA_ARGS__) CASE(5, v, __VA_ARGS__)
#define FROM_6(v, ...) CASE(6, v, __VA_ARGS__) CASE(7, v, __VA_ARGS__)
#define FROM_8(v, ...)                                                                             \
    CASE(8, v, __VA_ARGS__) CASE(9, v, __VA_ARGS__) CASE(10, v, __VA_ARGS__) CASE(11, v, __VA_ARGS__)
/* up to so many rows; named as default, the last costs gcc no register */
#define TO_4(v, block, ...) FROM_1(v, block, __VA_ARGS__) default: block(4, v, __VA_ARGS__);
#define TO_6(v, block, ...)                                                                        \
    FROM_1(v, block, __VA_ARGS__) FROM_4(v, block, __VA_ARGS__) default: block(6, v, __VA_ARGS__);
#define TO_8(v, block, ...)                                                                        \
    FROM_1(v, block, __VA_ARGS__) FROM_4(v, block, __VA_ARGS__) FROM_6(v, block, __VA_ARGS__)      \
    default: block(8, v, __VA_ARGS__);
#define TO_12(v, block, ...)                                                                       \
    FROM_1(v, block, __VA_ARGS__) FROM_4(v, block, __VA_ARGS__) FROM_6(v, block, __VA_ARGS__)      \
    FROM_8(v, block, __VA_ARGS__) default: block(12, v, __VA_ARGS__);

#if LANES == 16
#define TO_FEW TO_8
#define TO_HALF TO_12
#else
#define TO_FEW TO_4
#define TO_HALF TO_6
#endif

/* Calls `block(rows, vectors, …)` with constants: rows up to ROWS(vectors), or up to FEW_ROWS. */
#define CASES(...) SWITCH(TO_12, TO_HALF, __VA_ARGS__)
#define FEW_CASES(...) SWITCH(TO_FEW, TO_FEW, __VA_ARGS__)
#define SWITCH(TO_1, TO_2, ...)                                                                    \
    switch (vectors) {                                                                             \
    case 1: switch (rows) { TO_1(1, __VA_ARGS__) } break;                                          \
    case 2: switch (rows) { TO_2(2, __VA_ARGS__) } break;                                          \
    default: switch (rows) { TO_FEW(3, __VA_ARGS__) }                                              \
    }

#endif
