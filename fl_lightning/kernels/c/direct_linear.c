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

/* Where SGD's step of one client's weights reads and writes, which may be the same place:
 *
 *     g = v'x + decay from + momentum velocity,   velocity = g,   to = keep from - rate g
 *
 * Without momentum velocity is NULL; with 0 it may hold anything before. */
typedef struct {
    float *to, *velocity;
    const float *from;
    float keep, rate, momentum, decay;
    choice remembers; /* all ones if there is momentum, else 0 */
} sgd_step;

/* A vector whose first numbers are those at `done`. */
INLINE vector after(vector v, long count, const float *done) {
    if (!count) return v;
    choice first;
    for (int k = 0; k < LANES; k++) first[k] = k < count ? -1 : 0;
    return (vector)(((choice)load(done) & first) | ((choice)v & ~first));
}

/* Some rows of a step, some of its columns; each row's first numbers are done. */
INLINE void step_block(const int rows, const int vectors, const int has_velocity, long count,
                       const float *v, long out, const float *x, long in, const sgd_step *s, long start,
                       long done) {
    vector sums[MOST] = {{0}};
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int k = 0; k < vectors; k += 2) { /* for the next block, while this one multiplies */
            const long next = start + r * in + (vectors + k) * LANES;
            __builtin_prefetch(s->from + next);
            if (has_velocity) __builtin_prefetch(s->velocity + next);
        }
    products(rows, vectors, sums, count, v, 1, out, x, in);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int k = 0; k < vectors; k++) {
            const long at = start + r * in + k * LANES;
            const vector from = load(s->from + at);
            vector g = sums[r * vectors + k] + s->decay * from;
            if (has_velocity) {
                g += s->momentum * chosen(load(s->velocity + at), s->remembers);
                store(s->velocity + at, after(g, done, s->velocity + at));
            }
            store(s->to + at, after(s->keep * from - s->rate * g, done, s->to + at));
        }
}

/* Some rows of a mean take in a client's delta, some of their columns, with these bits:
 *
 *     mean + share (delta - mean),        from a half on  delta + (share - 1) (delta - mean)
 *
 * Its squares are added to `squares`, three vectors: with one each sum would wait for the last. */
INLINE void take_in(const int rows, const int vectors, const int is_less, const vector delta[MOST], long in,
                    float *mean, float share, long done, vector *squares) {
    static const float none[LANES];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int k = 0; k < vectors; k++) {
            float *at = mean + r * in + k * LANES;
            const vector old = load(at), new = delta[r * vectors + k], apart = new - old;
            const vector fresh = after(new, done, none);
            store(at, after(is_less ? share * apart + old : (share - 1) * apart + new, done, at));
            squares[k] += fresh * fresh;
        }
}

/* The same for the delta v'x. */
INLINE void fold_block(const int rows, const int vectors, long count, const float *v, long out,
                       const float *x, long in, float *mean, float share, long done, vector *squares) {
    vector sums[MOST] = {{0}};
    long b = 0;
    for (; b + 4 <= count; b += 4) /* few turns, whose end the processor foresees */
        UNROLL for (int k = 0; k < 4; k++)
            product(rows, vectors, sums, v + (b + k) * out, 1, x + (b + k) * in);
    for (; b < count; b++) product(rows, vectors, sums, v + b * out, 1, x + b * in);
    if (share < 0.5f)
        take_in(rows, vectors, 1, sums, in, mean, share, done, squares);
    else
        take_in(rows, vectors, 0, sums, in, mean, share, done, squares);
}

/* A mean (out, in) takes in every client's delta: v (clients, examples, out), x (clients, examples, in);
 * squares (clients), the sums of the deltas' squares */
void dense_fold(float *mean, const float *v, const float *x, const float *shares, float *squares,
                long clients, long examples, long in, long out) {
    for (; clients > 0; clients--, shares++, x += examples * in, v += examples * out) {
        double sum = 0;
        for (long o = 0, rows; o < out; o += rows) {
            vector of_rows[3] = {{0}};
            rows = turn(out - o, FEW_ROWS);
            long end = 0;
            FOR_COLUMNS(in, first, vectors) {
                FEW_CASES(fold_block, examples, v + o, out, x + first, in, mean + o * in + first,
                      *shares, end - first, of_rows)
                end = first + vectors * LANES;
            }
            sum += total(of_rows[0] + of_rows[1] + of_rows[2]);
        }
        *squares++ = (float)sum;
    }
}

/* The step of every client: v (clients, examples, out), x (clients, examples, in), velocity
 * (clients, out, in); of `to` and `from` it is said how far apart one client's begin. */
void dense_step(float *to, float *velocity, const float *from, const float *v, const float *x,
                long to_apart, long from_apart, long clients, long examples, long in, long out,
                float keep, float rate, float momentum, float decay) {
    sgd_step s = {to, velocity, from, keep, rate, momentum, decay, {0}};
    for (int k = 0; k < LANES; k++) s.remembers[k] = momentum != 0 ? -1 : 0;
    for (; clients > 0; clients--, x += examples * in, v += examples * out) {
        for (long o = 0, rows; o < out; o += rows) {
            rows = turn(out - o, FEW_ROWS);
            long end = 0;
            FOR_COLUMNS(in, first, vectors) {
                const long start = o * in + first, done = end - first;
                if (s.velocity) {
                    FEW_CASES(step_block, 1, examples, v + o, out, x + first, in, &s, start, done)
                } else {
                    FEW_CASES(step_block, 0, examples, v + o, out, x + first, in, &s, start, done)
                }
                end = first + vectors * LANES;
            }
        }
        s.to += to_apart, s.from += from_apart;
        if (s.velocity) s.velocity += out * in;
    }
}
