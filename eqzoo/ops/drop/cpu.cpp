// Dropout without a mask in memory: whether a number is kept follows from a seed and its place.
//
// Place i draws 32 bits of SplitMix64 (Steele et al., 2014) at counter i / 2, so that any thread can start anywhere, and
// the backward pass draws the same bits again.

#include "simd.h"

namespace {

constexpr int64_t step = 64;  // numbers of a block

inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

template <typename T, typename A>
void dropout(const T *x, T *y, int64_t numbers, int64_t seed, int64_t threshold, double factor, int64_t threads) {
    const int64_t blocks = (numbers + step - 1) / step;
    const A scale = static_cast<A>(factor);
    const uint32_t least = static_cast<uint32_t>(threshold);
    threads = std::max<int64_t>(1, std::min(threads, numbers / 16384));
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t block = 0; block < blocks; block++) {
        uint64_t pairs[step / 2];
        const uint64_t first = static_cast<uint64_t>(seed) + static_cast<uint64_t>(block) * (step / 2) * 0x9e3779b97f4a7c15ull;
        for (uint64_t i = 0; i < step / 2; i++) pairs[i] = mix(first + (i + 1) * 0x9e3779b97f4a7c15ull);
        uint32_t drawn[step];
        std::memcpy(drawn, pairs, sizeof drawn);
        const int64_t start = block * step;
        const auto draw = [&](int64_t i) {
            downcast(drawn[i] >= least ? upcast(x[start + i]) * scale : A(0), y + start + i);
        };
        if (start + step <= numbers) {
            for (int64_t i = 0; i < step; i++) draw(i);
        } else {
            for (int64_t i = 0; start + i < numbers; i++) draw(i);
        }
    }
}

}  // namespace

extern "C" void dropout(const Scalar *x, Scalar *y, int64_t numbers, int64_t seed, int64_t threshold, double factor,
        int64_t threads) {
    dropout<Scalar, Real>(x, y, numbers, seed, threshold, factor, threads);
}
