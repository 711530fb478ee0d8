/* Maxima of the windows that images (height, width, channels) consist of.
 *
 * `which` says where in its window a maximum is, row by row: of equal ones the first, and a NaN wins,
 * as in PyTorch.
 *
 * A pixel's last vector may reach into the pixels behind. All is written in the order in which it lies in
 * memory, so that these are written after it; only at the very end less than a vector is left.
 */

#include "vectors.h"

typedef struct {
    long height, width, channels; /* of an image */
    long tall, wide;              /* of a window */
} shape;

/* What images consist of. */
typedef struct {
    long rows, columns; /* of windows, in all images */
    long next, below;   /* numbers from one pixel to the next, and to the one below */
    long size;          /* numbers of all results */
} grid;

static grid make_grid(long images, shape s) {
    const long rows = images * (s.height / s.tall), columns = s.width / s.wide;
    return (grid){rows, columns, s.channels, s.width * s.channels, rows * columns * s.channels};
}

/* `function(tall, wide, …)`, with constants for windows of 2 × 2, which most are. */
#define BY_WINDOW(s, function, ...)                                                                \
    if ((s).tall == 2 && (s).wide == 2)                                                            \
        function(2, 2, __VA_ARGS__);                                                               \
    else                                                                                           \
        function((s).tall, (s).wide, __VA_ARGS__);

/* `function(left, …)`, with a constant where a whole vector is left. */
#define BY_LEFT(left, function, ...)                                                               \
    if ((left) >= LANES)                                                                           \
        function(LANES, __VA_ARGS__);                                                              \
    else                                                                                           \
        function(left, __VA_ARGS__);

/* So many numbers of a vector: of float, or of int with their bits. */
INLINE vector load_some(const long count, const void *from) {
    vector v = {0};
    memcpy(&v, from, count * sizeof(float));
    return v;
}

INLINE void store_some(const long count, void *to, vector v) { memcpy(to, &v, count * sizeof(float)); }

INLINE vector either(choice which, vector one, vector other) {
    return (vector)((choice)chosen(one, which) | (choice)chosen(other, ~which));
}

INLINE void find(const long count, const long tall, const long wide, const grid *g, float *maximum,
                 int *which, const float *values) {
    vector best = load_some(count, values), place = {0};
    for (long j = 0; j < tall; j++)
        for (long k = 0; k < wide; k++) {
            const vector value = load_some(count, values + j * g->below + k * g->next);
            const choice here = (choice){0} + (int)(j * wide + k);
            const choice wins = (value > best) | (value != value);
            best = either(wins, value, best);
            place = either(wins, (vector)here, place);
        }
    store_some(count, maximum, best);
    store_some(count, which, place);
}

INLINE void find_all(const long tall, const long wide, const grid *g, float *maxima, int *which,
                     const float *values) {
    for (long y = 0, result = 0; y < g->rows; y++)
        for (long x = 0; x < g->columns; x++, result += g->next)
            for (long c = 0; c < g->next; c += LANES) {
                const long to = result + c, from = y * tall * g->below + x * wide * g->next + c;
                BY_LEFT(g->size - to, find, tall, wide, g, maxima + to, which + to, values + from)
            }
}

void window_maximum(float *maxima, int *which, const float *values, long images, shape s) {
    const grid g = make_grid(images, s);
    BY_WINDOW(s, find_all, &g, maxima, which, values)
}

INLINE void pick(const long count, const long tall, const long wide, const grid *g, float *result,
                 const float *values, const int *which) {
    const choice place = (choice)load_some(count, which);
    vector found = {0};
    for (long j = 0; j < tall; j++)
        for (long k = 0; k < wide; k++) {
            const vector value = load_some(count, values + j * g->below + k * g->next);
            found = either(place == (int)(j * wide + k), value, found);
        }
    store_some(count, result, found);
}

INLINE void pick_all(const long tall, const long wide, const grid *g, float *results,
                     const float *values, const int *which) {
    for (long y = 0, result = 0; y < g->rows; y++)
        for (long x = 0; x < g->columns; x++, result += g->next)
            for (long c = 0; c < g->next; c += LANES) {
                const long to = result + c, from = y * tall * g->below + x * wide * g->next + c;
                BY_LEFT(g->size - to, pick, tall, wide, g, results + to, values + from, which + to)
            }
}

/* results, what lies at those places */
void window_pick(float *results, const float *values, const int *which, long images, shape s) {
    const grid g = make_grid(images, s);
    BY_WINDOW(s, pick_all, &g, results, values, which)
}

INLINE void put(const long count, int place, float *result, const float *value, const int *which) {
    const choice is_here = (choice)load_some(count, which) == place;
    store_some(count, result, chosen(load_some(count, value), is_here));
}

INLINE void put_all(const long tall, const long wide, const grid *g, float *results, const float *values,
                    const int *which) {
    for (long y = 0, value = 0; y < g->rows; y++, value += g->columns * g->next)
        for (long j = 0; j < tall; j++)
            for (long x = 0; x < g->columns; x++)
                for (long k = 0; k < wide; k++, results += g->next)
                    for (long c = 0; c < g->next; c += LANES) {
                        const long from = value + x * g->next + c;
                        BY_LEFT(g->size - from, put, j * wide + k, results + c, values + from,
                                which + from)
                    }
}

/* images with values at those places and 0 elsewhere */
void window_place(float *results, const float *values, const int *which, long images, shape s) {
    const grid g = make_grid(images, s);
    BY_WINDOW(s, put_all, &g, results, values, which)
}
