/* Convolutions with kernels of 3 × 3 or 5 × 5 by Winograd's method: fewer products for the same sums.
 *
 * A line of six pixels and one of a kernel's weights are taken, as polynomials are, at six points. Their
 * products there, summed over the channels, give back the 4 or 2 pixels of the output that the line
 * determines. Done in both directions, 36 products of a tile replace 144 or 100. For each of the 36 that
 * is one product of matrices, (tiles, in) (in, out). A gradient is the same, transposed.
 *
 * The channels, in and out, fill whole vectors.
 */

#include "convolution.h"
#include "small_products.h"

#define SIDE 6 /* of a tile */
#define POINTS (SIDE * SIDE)
#define MOST_TILES 48 /* at a time, so that what is known of them stays in the second cache */

/* The points are 0, A, -A, B, -B and infinity. All coefficients are exact but those of the weights, and
 * none is far from one: with the usual points, 1 and 2, rounding is twice as large. */
#define A 0.625f
#define B 1.25f
#define A2 (A * A)
#define B2 (B * B)

/* Of a line of a tile: its six pixels, as a polynomial's dual, at the points. */
INLINE void look(const int size, const int step, const vector *d, vector *at) {
    const vector even_a = d[4 * step] - B2 * d[2 * step], odd_a = A * (d[3 * step] - B2 * d[step]);
    const vector even_b = d[4 * step] - A2 * d[2 * step], odd_b = B * (d[3 * step] - A2 * d[step]);
    at[0] = d[4 * step] - (A2 + B2) * d[2 * step] + A2 * B2 * d[0];
    at[step] = even_a + odd_a;
    at[2 * step] = even_a - odd_a;
    at[3 * step] = even_b + odd_b;
    at[4 * step] = even_b - odd_b;
    at[5 * step] = d[5 * step] - (A2 + B2) * d[3 * step] + A2 * B2 * d[step];
}

/* `look`, transposed. */
INLINE void look_back(const int size, const int step, const vector *at, vector *d) {
    const vector sum_a = at[step] + at[2 * step], difference_a = A * (at[step] - at[2 * step]);
    const vector sum_b = at[3 * step] + at[4 * step], difference_b = B * (at[3 * step] - at[4 * step]);
    const vector first = at[0], last = at[5 * step];
    d[0] = A2 * B2 * first;
    d[step] = A2 * B2 * last - B2 * difference_a - A2 * difference_b;
    d[2 * step] = -(A2 + B2) * first - B2 * sum_a - A2 * sum_b;
    d[3 * step] = difference_a + difference_b - (A2 + B2) * last;
    d[4 * step] = first + sum_a + sum_b;
    d[5 * step] = last;
}

/* The output's pixels, 4 or 2 in a line, of the products at the points. */
INLINE void gather(const int size, const int step, const vector *at, vector *y) {
    const vector sum_a = at[step] + at[2 * step], difference_a = at[step] - at[2 * step];
    const vector sum_b = at[3 * step] + at[4 * step], difference_b = at[3 * step] - at[4 * step];
    const vector last = at[5 * step];
    y[0] = at[0] + sum_a + sum_b;
    y[step] = A * difference_a + B * difference_b;
    if (size == 4) {
        y[2 * step] = A2 * sum_a + B2 * sum_b;
        y[3 * step] = A2 * A * difference_a + B2 * B * difference_b + last;
    } else
        y[step] += last;
}

/* `gather`, transposed. */
INLINE void spread(const int size, const int step, const vector *y, vector *at) {
    vector even_a = y[0], even_b = y[0], odd_a = A * y[step], odd_b = B * y[step];
    const vector last = y[(size - 1) * step];
    if (size == 4) {
        even_a += A2 * y[2 * step];
        even_b += B2 * y[2 * step];
        odd_a += A2 * A * y[3 * step];
        odd_b += B2 * B * y[3 * step];
    }
    at[0] = y[0];
    at[step] = even_a + odd_a;
    at[2 * step] = even_a - odd_a;
    at[3 * step] = even_b + odd_b;
    at[4 * step] = even_b - odd_b;
    at[5 * step] = last;
}

/* Of a line of a kernel: its weights, as a polynomial, at the points. */
INLINE void weigh(const int size, const int step, const vector *w, vector *at) {
    const float of_a = 1 / (2 * A2 * (A2 - B2)), of_b = 1 / (2 * B2 * (B2 - A2));
    vector even_a = w[0] + A2 * w[2 * step], odd_a = A * w[step];
    vector even_b = w[0] + B2 * w[2 * step], odd_b = B * w[step];
    if (size == 5) {
        even_a += A2 * A2 * w[4 * step];
        even_b += B2 * B2 * w[4 * step];
        odd_a += A2 * A * w[3 * step];
        odd_b += B2 * B * w[3 * step];
    }
    const vector last = w[(size - 1) * step];
    at[0] = w[0] * (1 / (A2 * B2));
    at[step] = of_a * (even_a + odd_a);
    at[2 * step] = of_a * (even_a - odd_a);
    at[3 * step] = of_b * (even_b + odd_b);
    at[4 * step] = of_b * (even_b - odd_b);
    at[5 * step] = last;
}

/* `weigh`, transposed. */
INLINE void weigh_back(const int size, const int step, const vector *at, vector *w) {
    const float of_a = 1 / (2 * A2 * (A2 - B2)), of_b = 1 / (2 * B2 * (B2 - A2));
    const vector sum_a = of_a * (at[step] + at[2 * step]), sum_b = of_b * (at[3 * step] + at[4 * step]);
    const vector difference_a = of_a * (at[step] - at[2 * step]);
    const vector difference_b = of_b * (at[3 * step] - at[4 * step]);
    const vector last = at[5 * step];
    w[0] = at[0] * (1 / (A2 * B2)) + sum_a + sum_b;
    w[step] = A * difference_a + B * difference_b;
    w[2 * step] = A2 * sum_a + B2 * sum_b;
    if (size == 5) {
        w[3 * step] = A2 * A * difference_a + B2 * B * difference_b;
        w[4 * step] = A2 * A2 * sum_a + B2 * B2 * sum_b + last;
    } else
        w[2 * step] += last;
}

/* One of these over the columns of a square, then over the rows of what comes out. */
typedef void line(int size, int step, const vector *from, vector *to);
INLINE void square(line *one, const int size, const int from_side, const int to_side, const vector *from,
                   vector *to) {
    vector between[POINTS];
    UNROLL for (int c = 0; c < from_side; c++) one(size, SIDE, from + c, between + c);
    UNROLL for (int r = 0; r < to_side; r++) one(size, 1, between + r * SIDE, to + r * SIDE);
}

/* Pixels (images, height, width, channels), and the tiles that they fall into. */
typedef struct {
    long height, width, channels;
    long across, each; /* tiles in a row of an image; in an image */
    int size;          /* pixels from one tile to the next */
} field;

/* Where a tile's pixels begin, and how many of its rows and columns lie inside the image. */
typedef struct {
    long begin, high, broad;
} place;

INLINE place find(const field *f, long tile, const int side) {
    const long image = tile / f->each, y = tile % f->each / f->across * f->size;
    const long x = tile % f->each % f->across * f->size;
    const long high = f->height - y, broad = f->width - x;
    return (place){((image * f->height + y) * f->width + x) * f->channels, high < side ? high : side,
                   broad < side ? broad : side};
}

/* Some tiles at the points: to (POINTS, tiles, channels), from squares of side * side pixels. `point` is
 * how many numbers further on the next point's begin. */
INLINE void take(line *one, const int size, const int side, const field *f, const float *from, long begin,
                 long count, float *to, long point) {
    const long next = f->channels, below = f->width * next;
    for (long tile = 0; tile < count; tile++, to += next) {
        const place at = find(f, begin + tile, side);
        for (long c = 0; c < next; c += LANES) {
            const float *pixel = from + at.begin + c;
            vector pixels[POINTS], points[POINTS];
            if (at.high == side && at.broad == side) {
                UNROLL for (int r = 0; r < side; r++)
                    UNROLL for (int i = 0; i < side; i++)
                        pixels[r * SIDE + i] = load(pixel + r * below + i * next);
            } else {
                memset(pixels, 0, sizeof pixels);
                for (long r = 0; r < at.high; r++)
                    for (long i = 0; i < at.broad; i++)
                        pixels[r * SIDE + i] = load(pixel + r * below + i * next);
            }
            square(one, size, side, SIDE, pixels, points);
            UNROLL for (int i = 0; i < POINTS; i++) store(to + i * point + c, points[i]);
        }
    }
}

/* `take`, transposed: the sums of pixels and a bias or, without a bias, of pixels and what is there. */
INLINE void give(line *one, const int size, const int side, const field *f, const float *bias, float *to,
                 long begin, long count, const float *from, long point) {
    const long next = f->channels, below = f->width * next;
    for (long tile = 0; tile < count; tile++, from += next) {
        const place at = find(f, begin + tile, side);
        for (long c = 0; c < next; c += LANES) {
            float *pixel = to + at.begin + c;
            vector pixels[POINTS], points[POINTS];
            UNROLL for (int i = 0; i < POINTS; i++) points[i] = load(from + i * point + c);
            square(one, size, SIDE, side, points, pixels);
            for (long r = 0; r < at.high; r++)
                for (long i = 0; i < at.broad; i++) {
                    float *there = pixel + r * below + i * next;
                    store(there, pixels[r * SIDE + i] + load(bias ? bias + c : there));
                }
        }
    }
}

/* A client's weights at the points: to (POINTS, rows, columns). Their numbers, `step` apart from one row
 * or column to the next, are squares of size * size. */
INLINE void take_weights(const int size, const float *weights, long rows, long row_step, long columns,
                         long column_step, float *to, long point) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c += LANES) {
            const float *first = weights + r * row_step + c * column_step;
            float numbers[POINTS][LANES];
            vector w[POINTS], points[POINTS];
            for (int lane = 0; lane < LANES; lane++)
                UNROLL for (int y = 0; y < size; y++)
                    UNROLL for (int x = 0; x < size; x++)
                        numbers[y * SIDE + x][lane] = first[lane * column_step + y * size + x];
            UNROLL for (int y = 0; y < size; y++)
                UNROLL for (int x = 0; x < size; x++) w[y * SIDE + x] = load(numbers[y * SIDE + x]);
            square(weigh, size, size, SIDE, w, points);
            UNROLL for (int i = 0; i < POINTS; i++) store(to + i * point + r * columns + c, points[i]);
        }
}

/* `take_weights`, transposed. */
INLINE void give_weights(const int size, float *weights, long rows, long row_step, long columns,
                         long column_step, const float *from, long point) {
    for (long r = 0; r < rows; r++)
        for (long c = 0; c < columns; c += LANES) {
            float *first = weights + r * row_step + c * column_step;
            float numbers[POINTS][LANES];
            vector w[POINTS], points[POINTS];
            UNROLL for (int i = 0; i < POINTS; i++) points[i] = load(from + i * point + r * columns + c);
            square(weigh_back, size, SIDE, size, points, w);
            UNROLL for (int y = 0; y < size; y++)
                UNROLL for (int x = 0; x < size; x++) store(numbers[y * SIDE + x], w[y * SIDE + x]);
            for (int lane = 0; lane < LANES; lane++)
                UNROLL for (int y = 0; y < size; y++)
                    UNROLL for (int x = 0; x < size; x++)
                        first[lane * column_step + y * size + x] = numbers[y * SIDE + x][lane];
        }
}

INLINE void block(const int rows, const int vectors, long count, const float *a, long a_row, long a_step,
                  const float *b, long columns, int adds, float *to) {
    vector sums[MOST] = {{0}};
    if (adds)
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int v = 0; v < vectors; v++)
                sums[r * vectors + v] = load(to + r * columns + v * LANES);
    products(rows, vectors, sums, count, a, a_row, a_step, b, columns);
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < vectors; v++) store(to + r * columns + v * LANES, sums[r * vectors + v]);
}

/* to (rows, columns) = a (rows, count) b (count, columns), or added to it; a has steps of its own. */
static void multiply(long height, long count, long columns, const float *a, long a_row, long a_step,
                     const float *b, int adds, float *to) {
    for (long first = 0, vectors; first < columns; first += vectors * LANES) {
        vectors = turn((columns - first) / LANES, 2);
        for (long y = 0, rows; y < height; y += rows) {
            rows = turn(height - y, ROWS(vectors));
            CASES(block, count, a + y * a_row, a_row, a_step, b + first, columns, adds,
                  to + y * columns + first)
        }
    }
}

/* What the numbers at the points are of, and where they are. */
typedef struct {
    field image, output;
    long tiles; /* of one client */
    /* numbers from one point to the next */
    long image_point, output_point, weight_point;
    float *images, *outputs, *weights, *no_bias;
} plan;

static plan make_plan(long num_images, shape s) {
    const int size = SIDE + 1 - s.tall;
    const long high = s.height - s.tall + 1, broad = s.width - s.wide + 1;
    const long across = (broad + size - 1) / size, each = across * ((high + size - 1) / size);
    plan p = {.image = {s.height, s.width, s.in, across, each, size},
              .output = {high, broad, s.out, across, each, size},
              .tiles = each * num_images,
              /* a line of the cache more, or all points would lie in the same few places of it */
              .image_point = MOST_TILES * s.in + 16,
              .output_point = MOST_TILES * s.out + 16,
              .weight_point = s.in * s.out + 16};
    const long of_all = p.image_point + p.output_point + p.weight_point;
    p.images = room(POINTS * of_all + s.out);
    if (!p.images) return p;
    p.outputs = p.images + POINTS * p.image_point;
    p.weights = p.outputs + POINTS * p.output_point;
    p.no_bias = p.weights + POINTS * p.weight_point;
    memset(p.no_bias, 0, s.out * sizeof(float));
    return p;
}

/* For kernels of 3 × 3 and of 5 × 5: `function(kernel, size, …)` with constants. */
#define BY_KERNEL(s, function, ...)                                                                \
    if ((s).tall == 3)                                                                             \
        function(3, 4, __VA_ARGS__);                                                               \
    else                                                                                           \
        function(5, 2, __VA_ARGS__);

INLINE void of_outputs(const int kernel, const int size, const plan *p, float *outputs,
                       const float *images, const float *weights, const float *bias) {
    const long in = p->image.channels, out = p->output.channels, taps = kernel * kernel;
    take_weights(kernel, weights, in, taps, out, in * taps, p->weights, p->weight_point);
    for (long begin = 0, count; begin < p->tiles; begin += count) {
        count = turn(p->tiles - begin, MOST_TILES);
        take(look, 0, SIDE, &p->image, images, begin, count, p->images, p->image_point);
        for (int i = 0; i < POINTS; i++)
            multiply(count, in, out, p->images + i * p->image_point, in, 1,
                     p->weights + i * p->weight_point, 0, p->outputs + i * p->output_point);
        give(gather, size, size, &p->output, bias, outputs, begin, count, p->outputs, p->output_point);
    }
}

INLINE void of_images(const int kernel, const int size, const plan *p, float *images,
                      const float *gradients, const float *weights) {
    const long in = p->image.channels, out = p->output.channels, taps = kernel * kernel;
    take_weights(kernel, weights, out, in * taps, in, taps, p->weights, p->weight_point);
    for (long begin = 0, count; begin < p->tiles; begin += count) {
        count = turn(p->tiles - begin, MOST_TILES);
        take(spread, size, size, &p->output, gradients, begin, count, p->outputs, p->output_point);
        for (int i = 0; i < POINTS; i++)
            multiply(count, out, in, p->outputs + i * p->output_point, out, 1,
                     p->weights + i * p->weight_point, 0, p->images + i * p->image_point);
        give(look_back, 0, SIDE, &p->image, NULL, images, begin, count, p->images, p->image_point);
    }
}

INLINE void of_weights(const int kernel, const int size, const plan *p, float *weights,
                       const float *gradients, const float *images) {
    const long in = p->image.channels, out = p->output.channels, taps = kernel * kernel;
    for (long begin = 0, count; begin < p->tiles; begin += count) {
        count = turn(p->tiles - begin, MOST_TILES);
        take(spread, size, size, &p->output, gradients, begin, count, p->outputs, p->output_point);
        take(look, 0, SIDE, &p->image, images, begin, count, p->images, p->image_point);
        for (int i = 0; i < POINTS; i++)
            multiply(in, count, out, p->images + i * p->image_point, 1, in,
                     p->outputs + i * p->output_point, begin > 0, p->weights + i * p->weight_point);
    }
    give_weights(kernel, weights, in, taps, out, in * taps, p->weights, p->weight_point);
}

/* As `convolve` in direct_convolution.c. */
int convolve(float *outputs, const float *images, const float *weights, const float *bias, long clients,
             long num_images, shape s) {
    plan p = make_plan(num_images, s);
    if (!p.images) return 1;
    for (long c = 0; c < clients; c++) {
        BY_KERNEL(s, of_outputs, &p, outputs, images, weights, bias ? bias + c * s.out : p.no_bias)
        outputs += num_images * p.output.height * p.output.width * s.out;
        images += num_images * s.height * s.width * s.in;
        weights += s.tall * s.wide * s.in * s.out;
    }
    free(p.images);
    return 0;
}

/* As `convolve_images` there. */
int convolve_images(float *inputs, const float *gradients, const float *weights, long clients,
                    long num_images, shape s) {
    plan p = make_plan(num_images, s);
    if (!p.images) return 1;
    const long size = num_images * s.height * s.width * s.in;
    memset(inputs, 0, clients * size * sizeof(float));
    for (long c = 0; c < clients; c++) {
        BY_KERNEL(s, of_images, &p, inputs, gradients, weights)
        inputs += size;
        gradients += num_images * p.output.height * p.output.width * s.out;
        weights += s.tall * s.wide * s.in * s.out;
    }
    free(p.images);
    return 0;
}

/* As `convolve_weights` there. */
int convolve_weights(float *results, const float *gradients, const float *images, long clients,
                     long num_images, shape s) {
    plan p = make_plan(num_images, s);
    if (!p.images) return 1;
    for (long c = 0; c < clients; c++) {
        BY_KERNEL(s, of_weights, &p, results, gradients, images)
        results += s.tall * s.wide * s.in * s.out;
        gradients += num_images * p.output.height * p.output.width * s.out;
        images += num_images * s.height * s.width * s.in;
    }
    free(p.images);
    return 0;
}
