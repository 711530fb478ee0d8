/* Dense layers of many clients, each with weights (out, in) of its own: few examples.
 *
 * Nothing is copied or turned: whatever is multiplied lies side by side along `in`, whose last vector
 * overlaps the one before where `in` is not a multiple of eight. `in` is at least eight.
 */

#include "small_products.h"

typedef int choice __attribute__((vector_size(32)));

INLINE vector chosen(vector v, choice which) { return (vector)((choice)v & which); }

INLINE float total(vector v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

/* Some examples, some outputs. */
INLINE void dot_block(const int rows, const int columns, const float *x, const float *w, long in,
                      long out, float *y) {
    vector sums[12] = {{0}};
    vector right[3];
    const long whole = in / LANES * LANES, last = in - LANES;
    /* where rows are short the processor itself does not see which ones are next */
    const long ahead = in <= 1024 ? columns * in : 0;
    for (long i = 0; i < whole; i += LANES) {
        UNROLL for (int c = 0; c < columns; c++) {
            right[c] = load(w + c * in + i);
            __builtin_prefetch(w + c * in + i + ahead);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            const vector left = load(x + r * in + i);
            UNROLL for (int c = 0; c < columns; c++) sums[r * columns + c] += left * right[c];
        }
    }
    if (whole < in) {
        choice rest;
        for (int k = 0; k < LANES; k++) rest[k] = last + k < whole ? 0 : -1;
        UNROLL for (int c = 0; c < columns; c++) right[c] = chosen(load(w + c * in + last), rest);
        UNROLL for (int r = 0; r < rows; r++) {
            const vector left = chosen(load(x + r * in + last), rest);
            UNROLL for (int c = 0; c < columns; c++) sums[r * columns + c] += left * right[c];
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int c = 0; c < columns; c++) y[r * out + c] = total(sums[r * columns + c]);
}

/* y (clients, examples, out), x (clients, examples, in), w (clients, out, in) */
void dense(float *y, const float *x, const float *w, long clients, long examples, long in, long out) {
    for (; clients > 0; clients--, y += examples * out, x += examples * in, w += out * in)
        for (long o = 0, vectors; o < out; o += vectors) {
            vectors = turn(out - o, 3);
            for (long b = 0, rows; b < examples; b += rows) {
                rows = turn(examples - b, ROWS(vectors));
                CASES(dot_block, x + b * in, w + o * in, in, out, y + b * out + o)
            }
        }
}

/* Some rows of a sum of outer products, some of its columns. */
INLINE void sum_block(const int rows, const int vectors, long count, const float *a, long a_row,
                      long a_step, const float *b, long in, float *to) {
    vector sums[12] = {{0}};
    products(rows, vectors, sums, count, a, a_row, a_step, b, in);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) store(to + r * in + v * LANES, sums[r * vectors + v]);
}

/* How many vectors to do next from `first` on; the last begins before the end of those before it. */
INLINE long columns_from(long *first, long in) {
    const long left = in - *first;
    if (left >= LANES) return turn(left / LANES, 3);
    *first = in - LANES;
    return left > 0;
}

#define FOR_COLUMNS(in, first, vectors)                                                            \
    for (long first = 0, vectors; (vectors = columns_from(&first, in)); first += vectors * LANES)

/* x, the gradients with respect to inputs (clients, examples, in); v (clients, examples, out) */
void dense_inputs(float *x, const float *v, const float *w, long clients, long examples, long in,
                  long out) {
    for (; clients > 0; clients--, x += examples * in, v += examples * out, w += out * in)
        FOR_COLUMNS(in, first, vectors)
            for (long b = 0, rows; b < examples; b += rows) {
                rows = turn(examples - b, ROWS(vectors));
                CASES(sum_block, out, v + b * out, out, 1, w + first, in, x + b * in + first)
            }
}

/* w, the gradients with respect to weights (clients, out, in) */
void dense_weights(float *w, const float *v, const float *x, long clients, long examples, long in,
                   long out) {
    for (; clients > 0; clients--, x += examples * in, v += examples * out, w += out * in)
        for (long o = 0, rows; o < out; o += rows) {
            rows = turn(out - o, 4);
            FOR_COLUMNS(in, first, vectors)
                CASES(sum_block, examples, v + o, 1, out, x + first, in, w + o * in + first)
        }
}
