// The first pass of rounded_gaussian.py over its random words: whatever two words settle.
#include <stdint.h>

// count: numbers; choices, places: a random word each. ends: floor(2^63 P(strip ≤ b)) for every strip b,
// of which there are strips. guide: for every value of the 12 highest of 63 bits, the first strip that can
// be meant. shift: log2 of a strip's steps. curve: half of a strip's squared width in standard deviations,
// rounded up. Returns how many are not settled; open_ones has their indices, and numbers what they are if
// they are accepted, or nothing of use where the strip itself is open (open_strips is then 1). Without
// branches, and with signed conversions, it takes less than two thirds of the time.
int64_t first_pass(int64_t count, const uint64_t *choices, const uint64_t *places,
                   const uint64_t *ends, int64_t strips, const int32_t *guide, int64_t shift,
                   double curve, int64_t *numbers, int64_t *open_ones, uint8_t *open_strips)
{
    int64_t num_open = 0;
    for (int64_t i = 0; i < count; i++) {
        const uint64_t choice = choices[i] >> 1;
        int64_t strip = guide[choice >> 51];
        while (strip < strips && ends[strip] <= choice)
            strip++;
        const int is_open_strip = (strip == strips) | (ends[strip - (strip > 0)] == choice);
        const uint64_t place = places[i] >> 16, coin = places[i] & 0xffff;
        const int64_t inside = (int64_t)(((place >> (47 - shift)) + 1) >> 1);
        const int64_t magnitude = (strip << shift) + inside;
        const int64_t sign = -(int64_t)(choices[i] & 1); // 0 or -1
        numbers[i] = (magnitude ^ sign) - sign;
        const double share = (double)(int64_t)(place + 1) * 0x1p-48;
        const double fall = curve * share * (2.0 * (double)strip + share);
        const int is_accepted = (double)(int64_t)(coin + 1) * 0x1p-16 < 1.0 - fall;
        if (__builtin_expect(is_open_strip | !is_accepted, 0)) {
            open_ones[num_open] = i;
            open_strips[num_open] = (uint8_t)is_open_strip;
            num_open++;
        }
    }
    return num_open;
}
