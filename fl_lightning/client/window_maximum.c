/* Maxima of the windows that images (height, width, channels) consist of.
 *
 * `which` says where in its window a maximum is, row by row: of equal ones the first, and a NaN wins,
 * as in PyTorch.
 */

#include <string.h>

typedef struct {
    long height, width, channels; /* of an image */
    long tall, wide;              /* of a window */
} shape;

#define HIGH(s) ((s).height / (s).tall)
#define BROAD(s) ((s).width / (s).wide)

/* Goes through all pixels of the results; `first` is where the pixel's window begins. */
#define FOR_EACH_WINDOW(s, images)                                                                 \
    for (long i = 0; i < (images); i++)                                                            \
        for (long y = 0; y < HIGH(s); y++)                                                         \
            for (long x = 0,                                                                       \
                      first = ((i * (s).height + y * (s).tall) * (s).width) * (s).channels,        \
                      pixel = (i * HIGH(s) + y) * BROAD(s) * (s).channels;                         \
                 x < BROAD(s);                                                                     \
                 x++, first += (s).wide * (s).channels, pixel += (s).channels)

#define FOR_EACH_PLACE(s, at)                                                                      \
    for (int j = 0, at = 0; j < (s).tall; j++)                                                     \
        for (int k = 0; k < (s).wide; k++, at++)

static inline long offset(shape s, int j, int k) { return (j * s.width + k) * s.channels; }

void window_maximum(float *restrict maxima, int *restrict which, const float *restrict values,
                    long images, shape s) {
    FOR_EACH_WINDOW(s, images) {
        memcpy(maxima + pixel, values + first, s.channels * sizeof(float));
        memset(which + pixel, 0, s.channels * sizeof(int));
        FOR_EACH_PLACE(s, at) {
            const float *restrict from = values + first + offset(s, j, k);
            float *restrict best = maxima + pixel;
            int *restrict place = which + pixel;
            for (long c = 0; c < s.channels; c++) {
                const float value = from[c], so_far = best[c];
                const int wins = (value > so_far) | (value != value);
                best[c] = wins ? value : so_far;
                place[c] = wins ? at : place[c];
            }
        }
    }
}

/* results, what lies at those places */
void window_pick(float *restrict results, const float *restrict values, const int *restrict which,
                 long images, shape s) {
    FOR_EACH_WINDOW(s, images) {
        FOR_EACH_PLACE(s, at) {
            const float *restrict from = values + first + offset(s, j, k);
            float *restrict to = results + pixel;
            const int *restrict place = which + pixel;
            for (long c = 0; c < s.channels; c++) to[c] = place[c] == at ? from[c] : to[c];
        }
    }
}

/* images with values at those places and 0 elsewhere */
void window_place(float *restrict results, const float *restrict values, const int *restrict which,
                  long images, shape s) {
    FOR_EACH_WINDOW(s, images) {
        FOR_EACH_PLACE(s, at) {
            float *restrict to = results + first + offset(s, j, k);
            const float *restrict from = values + pixel;
            const int *restrict place = which + pixel;
            for (long c = 0; c < s.channels; c++) to[c] = place[c] == at ? from[c] : 0;
        }
    }
}
