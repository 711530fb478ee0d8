/* Numbers rounded at random, and places chosen or drawn, in one pass each.

   The draws are bit for bit those of torch's generator (Mersenne Twister) and of NumPy's PCG64, so that a
   client with a compiler and a server without one choose alike. */

#include <math.h>
#include <stdint.h>

#define SIZE 624
#define SHIFT 397

static inline uint32_t twisted(uint32_t one, uint32_t next) {
    return (((one & 0x80000000u) | (next & 0x7fffffffu)) >> 1) ^ (-(next & 1u) & 0x9908b0dfu);
}

/* Matsumoto and Nishimura 1998: the next 624 words. */
static void renew(uint32_t *s) {
    for (int k = 0; k < SIZE - SHIFT; k++) s[k] = s[k + SHIFT] ^ twisted(s[k], s[k + 1]);
    for (int k = SIZE - SHIFT; k < SIZE - 1; k++)
        s[k] = s[k + SHIFT - SIZE] ^ twisted(s[k], s[k + 1]);
    s[SIZE - 1] = s[SHIFT - 1] ^ twisted(s[SIZE - 1], s[0]);
}

static inline float uniform(uint32_t word) {
    word ^= word >> 11;
    word ^= (word << 7) & 0x9d2c5680u;
    word ^= (word << 15) & 0xefc60000u;
    word ^= word >> 18;
    return (float)(int32_t)(word & 0xffffffu) * 0x1p-24f;
}

static inline float clamped(float value, float low, float high) {
    value = value < low ? low : value;
    return value > high ? high : value;
}

/* x / step + shift, rounded up with the probability of its fraction. */
int64_t round_at_random(int8_t *restrict codes, const float *restrict x, const float *restrict steps,
                        int64_t n, int64_t has_one_step, float shift, float low, float high,
                        int64_t seed) {
    uint32_t s[SIZE] = {(uint32_t)seed};
    for (uint32_t k = 1; k < SIZE; k++) s[k] = 1812433253u * (s[k - 1] ^ (s[k - 1] >> 30)) + k;
    for (int64_t begin = 0; begin < n; begin += SIZE) {
        const int count = n - begin < SIZE ? (int)(n - begin) : SIZE;
        renew(s);
        for (int k = 0; k < count; k++) {
            const float exact = x[begin + k] / steps[has_one_step ? 0 : begin + k] + shift;
            const float below = floorf(exact);
            const float rounded = below + (uniform(s[k]) < exact - below ? 1.0f : 0.0f);
            codes[begin + k] = (int8_t)clamped(rounded, low, high);
        }
    }
    return n;
}

/* O'Neill 2014, PCG XSL RR 128/64: keys up to a bound, and their places; returns how many. */
int64_t keys_below(int64_t *restrict places, uint64_t *restrict keys, int64_t n, uint64_t bound,
                   const uint64_t *state) {
    typedef unsigned __int128 wide;
    const wide factor = (wide)0x2360ed051fc65da4u << 64 | 0x4385df649fccf645u;
    const wide added = (wide)state[2] << 64 | state[3];
    wide s = (wide)state[0] << 64 | state[1];
    int64_t found = 0;
    for (int64_t k = 0; k < n; k++) {
        s = s * factor + added;
        const uint64_t high = (uint64_t)(s >> 64), mixed = high ^ (uint64_t)s;
        const int turn = (int)(high >> 58);
        const uint64_t key = mixed >> turn | mixed << (-turn & 63);
        places[found] = k;
        keys[found] = key;
        found += key <= bound;
    }
    return found;
}

/* Places of the numbers that are at least so large; returns how many. */
int64_t places_from(int64_t *restrict places, const float *restrict x, int64_t n, float least) {
    int64_t found = 0;
    for (int64_t k = 0; k < n; k++) {
        places[found] = k;
        found += x[k] >= least;
    }
    return found;
}
