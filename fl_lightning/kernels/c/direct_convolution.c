/* Convolutions of many clients, each with weights of its own: few channels, small images.
 *
 * For one row of a kernel, the kernel_width * in numbers that an output pixel reads lie side by side, and
 * those of the next pixel begin `in` numbers further on: every loop below is a small matrix product whose
 * one factor overlaps with itself. The other one, the weights, is laid out anew for it.
 */

#include "convolution.h"
#include "small_products.h"

/* Some pixels of a row of the output, some of its channels. */
INLINE void output_block(const int rows, const int vectors, const shape *s, const float *image,
                         const float *weights, const float *bias, long padded, float *to) {
    vector sums[MOST];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) sums[r * vectors + v] = load(bias + v * LANES);
    const long reach = s->wide * s->in;
    for (long y = 0; y < s->tall; y++)
        products(rows, vectors, sums, reach, image + y * s->width * s->in, s->in, 1,
                 weights + y * reach * padded, padded);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++)
            store(to + r * s->out + v * LANES, sums[r * vectors + v]);
}

/* Weights' rows, (kernel height, kernel width, in), of `padded` numbers each: the channels out. */
static void weights_by_output(float *to, const float *weights, const shape *s, long padded) {
    const long taps = s->tall * s->wide;
    for (long first = 0; first < s->out; first += LANES) {
        const long last = first + LANES < s->out ? first + LANES : s->out;
        for (long i = 0; i < s->in; i++)
            for (long tap = 0; tap < taps; tap++)
                for (long o = first; o < last; o++)
                    to[(tap * s->in + i) * padded + o] = weights[(o * s->in + i) * taps + tap];
    }
}

/* That, undone. */
static void weights_from_output(float *weights, const float *from, const shape *s, long padded) {
    const long taps = s->tall * s->wide;
    for (long first = 0; first < s->out; first += LANES) {
        const long last = first + LANES < s->out ? first + LANES : s->out;
        for (long i = 0; i < s->in; i++)
            for (long tap = 0; tap < taps; tap++)
                for (long o = first; o < last; o++)
                    weights[(o * s->in + i) * taps + tap] = from[(tap * s->in + i) * padded + o];
    }
}

/* Rows (kernel height, out) of `padded` numbers each: (kernel width, in). */
static void weights_by_input(float *to, const float *weights, const shape *s, long padded) {
    const long taps = s->tall * s->wide;
    for (long o = 0; o < s->out; o++)
        for (long y = 0; y < s->tall; y++)
            for (long x = 0; x < s->wide; x++)
                for (long i = 0; i < s->in; i++)
                    to[(y * s->out + o) * padded + x * s->in + i] =
                        weights[(o * s->in + i) * taps + y * s->wide + x];
}

/* outputs (clients, images, height - tall + 1, width - wide + 1, out)
 * images  (clients, images, height, width, in)
 * weights (clients, out, in, tall, wide)
 * bias    (clients, out), or NULL */
int convolve(float *outputs, const float *images, const float *weights, const float *bias, long clients,
             long num_images, shape s) {
    const long high = s.height - s.tall + 1, broad = s.width - s.wide + 1;
    const long padded = rounded(s.out), taps = s.tall * s.wide * s.in;
    float *own = room((taps + 1) * padded);
    if (!own) return 1;
    float *own_bias = own + taps * padded;
    memset(own, 0, (taps + 1) * padded * sizeof(float));
    for (long c = 0; c < clients; c++) {
        weights_by_output(own, weights + c * taps * s.out, &s, padded);
        if (bias) memcpy(own_bias, bias + c * s.out, s.out * sizeof(float));
        for (long i = 0; i < num_images; i++) {
            const float *image = images + (c * num_images + i) * s.height * s.width * s.in;
            float *output = outputs + (c * num_images + i) * high * broad * s.out;
            /* whole vectors are stored: what of one is past the last channel is overwritten by the
             * next pixel's first channels, which therefore come later */
            for (long end = padded, vectors; end > 0; end -= vectors * LANES) {
                vectors = turn(end / LANES, 3);
                const long first = end - vectors * LANES;
                for (long y = 0; y < high; y++)
                    for (long x = 0, rows; x < broad; x += rows) {
                        rows = turn(broad - x, ROWS(vectors));
                        CASES(output_block, &s, image + (y * s.width + x) * s.in, own + first,
                              own_bias + first, padded, output + (y * broad + x) * s.out + first)
                    }
            }
        }
    }
    free(own);
    return 0;
}

/* What some output pixels give back to some of the inputs under one row of the kernel. */
INLINE void input_block(const int rows, const int vectors, const shape *s, const float *gradients,
                        const float *weights, long padded, float *to) {
    vector sums[MOST] = {{0}};
    products(rows, vectors, sums, s->out, gradients, s->out, 1, weights, padded);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *at = to + r * s->in + v * LANES;
            store(at, load(at) + sums[r * vectors + v]);
        }
}

/* inputs, the gradients with respect to images */
int convolve_images(float *inputs, const float *gradients, const float *weights, long clients,
                  long num_images, shape s) {
    const long high = s.height - s.tall + 1, broad = s.width - s.wide + 1;
    const long reach = s.wide * s.in, padded = rounded(reach);
    const long size = s.height * s.width * s.in;
    float *own = room(s.tall * s.out * padded + size + LANES);
    if (!own) return 1;
    float *input = own + s.tall * s.out * padded;
    memset(own, 0, s.tall * s.out * padded * sizeof(float));
    for (long c = 0; c < clients; c++) {
        weights_by_input(own, weights + c * s.tall * s.out * reach, &s, padded);
        for (long i = 0; i < num_images; i++) {
            const float *gradient = gradients + (c * num_images + i) * high * broad * s.out;
            memset(input, 0, (size + LANES) * sizeof(float));
            for (long ky = 0; ky < s.tall; ky++)
                for (long first = 0, vectors; first < padded; first += vectors * LANES) {
                    vectors = turn((padded - first) / LANES, 3);
                    for (long y = 0; y < high; y++)
                        for (long x = 0, rows; x < broad; x += rows) {
                            rows = turn(broad - x, ROWS(vectors));
                            CASES(input_block, &s, gradient + (y * broad + x) * s.out,
                                  own + ky * s.out * padded + first, padded,
                                  input + ((y + ky) * s.width + x) * s.in + first)
                        }
                }
            memcpy(inputs + (c * num_images + i) * size, input, size * sizeof(float));
        }
    }
    free(own);
    return 0;
}

/* Adds to some rows of the weights' gradients, some of their columns, what some rows of an image
 * say. */
INLINE void weight_block(const int rows, const int vectors, const shape *s, const float *image,
                         const float *gradients, long high, float *to, long padded) {
    vector sums[MOST] = {{0}};
    const long broad = s->width - s->wide + 1;
    for (long y = 0; y < high; y++)
        products(rows, vectors, sums, broad, image + y * s->width * s->in, 1, s->in,
                 gradients + y * broad * vectors * LANES, vectors * LANES);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) {
            float *at = to + r * padded + v * LANES;
            store(at, load(at) + sums[r * vectors + v]);
        }
}

/* The first `size` of `count` numbers, or all of them and then zeros; whole vectors. */
INLINE void copy_padded(float *to, const float *from, long count, long size) {
    long i = 0;
    for (; i + LANES <= count && i < size; i += LANES) store(to + i, load(from + i));
    for (; i < size; i++) to[i] = i < count ? from[i] : 0;
}

/* results, the gradients with respect to weights */
int convolve_weights(float *results, const float *gradients, const float *images, long clients,
                     long num_images, shape s) {
    const long high = s.height - s.tall + 1, broad = s.width - s.wide + 1;
    const long padded = rounded(s.out), reach = s.wide * s.in, taps = s.tall * reach;
    /* so many rows of an image at a time that what is read of them stays in the first cache */
    const long most = broad < 128 ? 128 / broad : 1;
    float *own = room(taps * padded + most * broad * 3 * LANES);
    if (!own) return 1;
    float *panel = own + taps * padded;
    for (long c = 0; c < clients; c++) {
        memset(own, 0, taps * padded * sizeof(float));
        for (long i = c * num_images; i < (c + 1) * num_images; i++)
            for (long begin = 0, count; begin < high; begin += count) {
                count = turn(high - begin, most);
                const float *gradient = gradients + (i * high + begin) * broad * s.out;
                const float *image = images + (i * s.height + begin) * s.width * s.in;
                for (long first = 0, vectors; first < padded; first += vectors * LANES) {
                    vectors = turn((padded - first) / LANES, 3);
                    const long size = vectors * LANES, left = s.out - first;
                    for (long pixel = 0; pixel < count * broad; pixel++)
                        copy_padded(panel + pixel * size, gradient + pixel * s.out + first, left, size);
                    for (long ky = 0; ky < s.tall; ky++)
                        for (long tap = 0, rows; tap < reach; tap += rows) {
                            rows = turn(reach - tap, ROWS(vectors));
                            CASES(weight_block, &s, image + ky * s.width * s.in + tap, panel, count,
                                  own + (ky * reach + tap) * padded + first, padded)
                        }
                }
            }
        weights_from_output(results + c * taps * s.out, own, &s, padded);
    }
    free(own);
    return 0;
}
