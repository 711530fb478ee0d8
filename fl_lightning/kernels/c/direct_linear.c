/* Dense layers of many clients, each with weights (out, in) of its own.
 *
 * Where examples are few nothing is copied or turned: whatever is multiplied lies side by side along `in`,
 * whose last vector overlaps the one before where `in` is not a multiple of LANES. `in` is at least LANES.
 */

#include "small_products.h"
#if LANES == 16
#include <immintrin.h>
#endif

/* In a register: gcc would read it anew for every product. */
INLINE vector kept(vector v) {
#if defined(__x86_64__) && !defined(__clang__)
    __asm__("" : "+v"(v));
#endif
    return v;
}

#if LANES == 16
INLINE float total(vector v) { return _mm512_reduce_add_ps((__m512)v); }
#else
INLINE float total(vector v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
#endif

/* Some examples, some outputs. While the first ones are multiplied, the next weights come. */
INLINE void dot_block(const int rows, const int columns, const float *x,
                      const float *w, long in, long out, float *y) {
    vector sums[MOST] = {{0}};
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
            const vector left = kept(load(x + r * in + i));
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

/* As many examples stay in the cache while all outputs go over them. */
#define CHUNK 64

/* Some examples, some outputs, whose weights lie side by side in a panel (in, outputs); of `left` outputs
 * the last ones may be no more than room. */
INLINE void panel_block(const int rows, const int vectors, const float *x, const float *panel, long in,
                        long out, long left, float *y) {
    vector sums[MOST] = {{0}};
    products(rows, vectors, sums, in, x, in, 1, panel, vectors * LANES);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            const long count = left - v * LANES < LANES ? left - v * LANES : LANES;
            memcpy(y + r * out + v * LANES, &sums[r * vectors + v], count * sizeof(float));
        }
}

/* One client's layer of many examples, which repay that its weights are laid out anew; false without the
 * memory for it. */
static int dense_of_many(float *y, const float *x, const float *w, long examples, long in, long out) {
    float *panels = room(rounded(out) * in);
    if (!panels) return 0;
    for (long o = 0, vectors; o < out; o += vectors * LANES) {
        vectors = turn((rounded(out) - o) / LANES, 3);
        const long size = vectors * LANES;
        for (long i = 0; i < in; i++)
            for (long k = 0; k < size; k++)
                panels[o * in + i * size + k] = o + k < out ? w[(o + k) * in + i] : 0;
    }
    for (long left = examples, count; left > 0; left -= count, y += count * out, x += count * in) {
        count = left < CHUNK ? left : CHUNK;
        for (long o = 0, vectors; o < out; o += vectors * LANES) {
            vectors = turn((rounded(out) - o) / LANES, 3);
            for (long b = 0, rows; b < count; b += rows) {
                rows = turn(count - b, ROWS(vectors));
                CASES(panel_block, x + b * in, panels + o * in, in, out, out - o, y + b * out + o)
            }
        }
    }
    free(panels);
    return 1;
}

/* One client's layer of few examples. */
static void dense_of_few(float *y, const float *x, const float *w, long examples, long in, long out) {
    for (long left = examples, count; left > 0; left -= count, y += count * out, x += count * in) {
        count = left < CHUNK ? left : CHUNK;
        for (long o = 0, vectors; o < out; o += vectors) {
            vectors = turn(out - o, 3);
            for (long b = 0, rows; b < count; b += rows) {
                rows = turn(count - b, ROWS(vectors));
                CASES(dot_block, x + b * in, w + o * in, in, out, y + b * out + o)
            }
        }
    }
}

/* y (clients, examples, out), x (clients, examples, in), w (clients, out, in) */
void dense(float *y, const float *x, const float *w, long clients, long examples, long in, long out) {
    const int are_many = examples >= 4 * CHUNK && out >= 32;
    for (; clients > 0; clients--, w += out * in, y += examples * out, x += examples * in)
        if (!are_many || !dense_of_many(y, x, w, examples, in, out))
            dense_of_few(y, x, w, examples, in, out);
}

/* Some rows of a sum of outer products, some of its columns. */
INLINE void sum_block(const int rows, const int vectors, long count, const float *a, long a_row,
                      long a_step, const float *b, long in, float *to) {
    vector sums[MOST] = {{0}};
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
            rows = turn(out - o, FEW_ROWS);
            FOR_COLUMNS(in, first, vectors)
                FEW_CASES(sum_block, examples, v + o, 1, out, x + first, in, w + o * in + first)
        }
}
