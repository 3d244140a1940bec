// Products in bfloat16, on processors that multiply it: AMX, or else AVX512-BF16. Transforms are computed in float32 and
// rounded once, sums of products are float32.
//
// Matrices lie in blocks of 16 x 32 numbers, a KiB: the left factor in 16 rows of 32 numbers, the right one in 16 pairs
// of rows, the two numbers of a column side by side. Rows of the filters are taps, then channels, padded to multiples of
// 16; where that is a multiple of 32, 32 channels stand in the order 0, 2, .., 30, 1, 3, .., 31, in which they are read
// and written without shuffles.
#pragma once
#include "irreps.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define EQZOO_MULTIPLIES_BFLOAT16
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {
namespace halves {

using V = __m512;
constexpr int64_t block = 512;                   // numbers of a block
constexpr int64_t deepest = 18;                  // the most blocks of rows of the filters at a time
constexpr int64_t held = int64_t(320) << 10;     // bytes that a tile may take of a thread's cache
constexpr int64_t many = int64_t(1500) << 10;    // bytes of filters that the cache does not hold beside such a tile:
constexpr int64_t spread = int64_t(960) << 10;   // these are read once a tile, which may take so much
constexpr int64_t apart = 96;                    // numbers between matrices, apart in the first cache

// Fetches a run of memory into the second cache.
inline void fetch(Run ahead) {
    for (int64_t i = 0; i < ahead.bytes; i += 64) __builtin_prefetch(ahead.from + i, 0, 2);
}

// What is in memory, to the eyes of a compiler whose AMX intrinsics do not say what they read and write.
inline void settled(const void *p) { asm volatile("" : : "r"(p) : "memory"); }

// One thread's use of AMX: the sizes of its registers, and what they were before.
class Registers {
   public:
#if defined(__AMX_BF16__) && defined(__linux__)
    Registers() {
        if (!allowed()) return;
        settled(before_);
        _tile_storeconfig(before_);
        settled(before_);
        alignas(64) uint8_t sizes[64] = {1};
        for (int i = 0; i < 8; i++) sizes[16 + 2 * i] = 64, sizes[48 + i] = 16;
        settled(sizes);
        _tile_loadconfig(sizes);
    }
    ~Registers() {
        settled(before_);
        if (allowed()) _tile_loadconfig(before_);
    }
    // Linux gives a process these registers on request.
    static bool allowed() {
        static const bool given = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18) == 0;
        return given;
    }

   private:
    alignas(64) uint8_t before_[64];
#else
    static bool allowed() { return false; }
#endif
};

// Blocks of a product c += a b, those of c of 16 x 16 numbers: where the next one along the rows, the columns and the
// sum is.
struct Steps {
    int64_t a_row, a_sum, b_column, b_sum, c_row, c_column;
};

#if defined(__AMX_BF16__) && defined(__linux__)
template <int M, int N>
inline void multiply_amx(const uint16_t *a, const uint16_t *b, float *c, const Steps &s, int64_t count, bool first,
                         Run ahead) {
    constexpr int64_t line = 16 * sizeof(float);
    settled(a);
    if (first) {
        _tile_zero(0);
        if constexpr (N > 1) _tile_zero(1);
        if constexpr (M > 1) _tile_zero(2);
        if constexpr (M > 1 && N > 1) _tile_zero(3);
    } else {
        _tile_loadd(0, c, line);
        if constexpr (N > 1) _tile_loadd(1, c + s.c_column, line);
        if constexpr (M > 1) _tile_loadd(2, c + s.c_row, line);
        if constexpr (M > 1 && N > 1) _tile_loadd(3, c + s.c_row + s.c_column, line);
    }
    for (int64_t k = 0; k < count; k++, a += s.a_sum, b += s.b_sum, ahead.from += ahead.bytes) {
        fetch(ahead);
        _tile_loadd(6, b, 64);
        _tile_loadd(4, a, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (N > 1) {
            _tile_loadd(7, b + s.b_column, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (M > 1) {
            _tile_loadd(5, a + s.a_row, 64);
            _tile_dpbf16ps(2, 5, 6);
            if constexpr (N > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, line);
    if constexpr (N > 1) _tile_stored(1, c + s.c_column, line);
    if constexpr (M > 1) _tile_stored(2, c + s.c_row, line);
    if constexpr (M > 1 && N > 1) _tile_stored(3, c + s.c_row + s.c_column, line);
    settled(c);
}
#endif

template <int M, int N>
inline void multiply_vectors(const uint16_t *a, const uint16_t *b, float *c, const Steps &s, int64_t count,
                             bool first, Run ahead) {
    constexpr int rows = 8;
    for (int m = 0; m < M; m++)
        for (int r = 0; r < 16; r += rows) {
            const uint16_t *left = a + m * s.a_row + r * 32, *right = b;
            float *to = c + m * s.c_row + r * 16;
            V acc[rows][N];
            for (int i = 0; i < rows; i++)
                for (int n = 0; n < N; n++)
                    acc[i][n] = first ? _mm512_setzero_ps() : _mm512_loadu_ps(to + i * 16 + n * s.c_column);
            for (int64_t k = 0; k < count; k++, left += s.a_sum, right += s.b_sum) {
                if (m + r == 0) fetch(ahead), ahead.from += ahead.bytes;
                for (int q = 0; q < 16; q++) {
                    __m512bh columns[N];
                    for (int n = 0; n < N; n++)
                        columns[n] = (__m512bh)_mm512_load_si512(right + n * s.b_column + q * 32);
                    for (int i = 0; i < rows; i++) {
                        int32_t pair;
                        std::memcpy(&pair, left + i * 32 + q * 2, sizeof pair);
                        for (int n = 0; n < N; n++)
                            acc[i][n] = _mm512_dpbf16_ps(acc[i][n], (__m512bh)_mm512_set1_epi32(pair), columns[n]);
                    }
                }
            }
            for (int i = 0; i < rows; i++)
                for (int n = 0; n < N; n++) _mm512_storeu_ps(to + i * 16 + n * s.c_column, acc[i][n]);
        }
}

// c (M, N blocks) += a b, summed over `count` blocks.
template <int M, int N>
inline void multiply(const uint16_t *a, const uint16_t *b, float *c, const Steps &s, int64_t count, bool first,
                     Run ahead) {
#if defined(__AMX_BF16__) && defined(__linux__)
    if (Registers::allowed()) return multiply_amx<M, N>(a, b, c, s, count, first, ahead);
#endif
    multiply_vectors<M, N>(a, b, c, s, count, first, ahead);
}

// The same for any number of blocks.
inline void multiply(const uint16_t *a, const uint16_t *b, float *c, const Steps &s, int64_t m, int64_t n,
                     int64_t count, bool first, Run ahead) {
    if (m > 1)
        return n > 1 ? multiply<2, 2>(a, b, c, s, count, first, ahead)
                     : multiply<2, 1>(a, b, c, s, count, first, ahead);
    return n > 1 ? multiply<1, 2>(a, b, c, s, count, first, ahead) : multiply<1, 1>(a, b, c, s, count, first, ahead);
}

// 16 W channels as float32; W = 2: first those with even numbers. Where the mask has no bit, zero.
template <int W, bool FULL = false>
inline void widen(const bfloat16 *from, uint32_t mask, V *to) {
    if constexpr (W == 2) {
        const __m512i x = FULL ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(mask, from);
        to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
        to[1] = _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u))));
    } else {
        const __m512i x = _mm512_cvtepu16_epi32(FULL ? _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from))
                                                     : _mm256_maskz_loadu_epi16(__mmask16(mask), from));
        to[0] = _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    }
}

template <int W>
inline void narrow(const V *v, uint16_t *to) {
    if constexpr (W == 2)
        _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]));
    else
        _mm256_store_si256(reinterpret_cast<__m256i *>(to), (__m256i)_mm512_cvtneps_pbh(v[0]));
}

// Two vectors, number beside number.
inline __m512i zip(V first, V second) {
    const __m512i half = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    alignas(64) static constexpr uint16_t order[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_permutexvar_epi16(_mm512_load_si512(order), half);
}

inline uint32_t mask_of(int64_t count) {
    return count >= 32 ? ~0u : count <= 0 ? 0u : (1u << count) - 1;
}

// The sizes of packed matrices, in blocks unless it says otherwise.
template <int ORDER>
struct Sizes {
    using I = Irreps<ORDER>;
    explicit Sizes(const Shape &s) {
        channels = padded(s.in, 16), out = padded(s.out, 16);
        whole = channels % 32 == 0;
        rows = padded(s.taps() * channels, 32);
        for (int b = 0; b < I::count; b++) start[b] = size, size += I::parts(b) * rows / 32 * columns(b);
    }
    int64_t columns(int b) const { return I::parts(b) * out / 16; }
    // Filters: pairs of columns (the last one maybe single); of each, the rows of all parts.
    int64_t at(int b, int part, int64_t row, int64_t column) const {
        const int64_t first = column / 2 * 2, wide = std::min<int64_t>(2, columns(b) - first);
        return start[b] + I::parts(b) * rows / 32 * first + (part * rows / 32 + row) * wide + column - first;
    }
    // Their gradients, 16 outputs x 16 rows each.
    int64_t gradient_at(int b, int part, int64_t row, int64_t column) const {
        return 2 * start[b] + (part * (rows / 16) + row) * columns(b) + column;
    }
    // Products of pairs of columns, those of all parts and copies.
    int64_t products() const {
        int64_t all = 0;
        for (int b = 0; b < I::count; b++) all += I::parts(b) * I::copies(b) * ((columns(b) + 1) / 2);
        return all;
    }
    // The channel of a place among those of a tap.
    int64_t channel(int64_t place) const {
        return whole ? place / 32 * 32 + place % 16 * 2 + place / 16 % 2 : place;
    }

    int64_t channels, out;  // padded, in numbers
    bool whole;             // whether channels are read 32 at a time
    int64_t rows;           // of one part, in numbers
    int64_t start[I::count], size = 0;
};

// Transforms filters and packs them.
template <int ORDER>
void pack(const bfloat16 *filters, const Shape &s, bool swapped, const Sizes<ORDER> &sizes, uint16_t *packed,
          int threads) {
    using I = Irreps<ORDER>;
    const int64_t entries = ORDER * s.taps(), unused = sizes.rows - s.taps() * sizes.channels;
    const int64_t out_step = swapped ? entries : s.in * entries, in_step = swapped ? s.out * entries : entries;
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Buffer<float> rotated(2 * entries * 16);
#pragma omp for schedule(static) collapse(2)
        for (int64_t n = 0; n < sizes.out; n += 16)
            for (int64_t pair = 0; pair < sizes.channels; pair += 2) {
                const int64_t count = std::min<int64_t>(16, s.out - n);
                for (int i = 0; i < 2; i++) {
                    const int64_t c = sizes.channel(pair + i);
                    float *to = rotated.data() + i * entries * 16;
                    if (c < s.in)
                        interleave<bfloat16, float, 16>(filters + n * out_step + c * in_step, out_step, count, entries,
                                                        to);
                    else
                        std::memset(to, 0, entries * 16 * sizeof(float));
                }
                for (int64_t e = 0; e < s.taps(); e++) {
                    V v[2][ORDER];
                    for (int i = 0; i < 2; i++) {
                        for (int j = 0; j < ORDER; j++)
                            v[i][j] = _mm512_load_ps(rotated.data() +
                                                     (i * entries + s.places[e * ORDER + j]) * 16);
                        transform<ORDER>(v[i]);
                        for (int j = 0; j < ORDER; j++) v[i][j] = v[i][j] * float(I::scale(j));
                    }
                    const int64_t row = e * sizes.channels + pair;
                    for (int b = 0; b < I::count; b++)
                        for (int i = 0; i < I::parts(b); i++)
                            for (int j = 0; j < I::parts(b); j++) {
                                const int from = I::component(b, i, j);
                                const float sign = float(I::sign(b, i, j));
                                const int64_t at = sizes.at(b, i, row / 32, (j * sizes.out + n) / 16);
                                _mm512_store_si512(packed + at * block + row % 32 * 16,
                                                   zip(v[0][from] * sign, v[1][from] * sign));
                            }
                }
            }
    }
    // Rows that fill the last block.
    for (int b = 0; b < I::count && unused; b++)
        for (int i = 0; i < I::parts(b); i++)
            for (int64_t n = 0; n < sizes.columns(b); n++)
                std::memset(packed + sizes.at(b, i, sizes.rows / 32 - 1, n) * block + (32 - unused) * 16, 0,
                            unused * 16 * sizeof(uint16_t));
}

// The gradients of the filters from those of the packed ones.
template <int ORDER>
void unpack(const float *packed, const Shape &s, const Sizes<ORDER> &sizes, bfloat16 *filters, int threads) {
    using I = Irreps<ORDER>;
    const int64_t entries = ORDER * s.taps();
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Buffer<float> rotated(16 * entries * 16), values(ORDER * 256);
        alignas(64) float turned[256];
#pragma omp for schedule(static) collapse(2)
        for (int64_t n = 0; n < sizes.out; n += 16)
            for (int64_t place = 0; place < sizes.channels; place += 16) {
                for (int64_t e = 0; e < s.taps(); e++) {
                    const int64_t row = (e * sizes.channels + place) / 16;
                    std::memset(values.data(), 0, ORDER * 256 * sizeof(float));
                    for (int b = 0; b < I::count; b++)
                        for (int i = 0; i < I::parts(b); i++)
                            for (int j = 0; j < I::parts(b); j++) {
                                const int64_t at = sizes.gradient_at(b, i, row, (j * sizes.out + n) / 16);
                                transpose<float>(packed + at * 256, 16, 16, 16, turned, 16);
                                float *to = values.data() + I::component(b, i, j) * 256;
                                const float sign = float(I::sign(b, i, j));
                                for (int k = 0; k < 256; k++) to[k] += turned[k] * sign;
                            }
                    for (int k = 0; k < 16; k++) {
                        V v[ORDER];
                        for (int j = 0; j < ORDER; j++)
                            v[j] = _mm512_load_ps(values.data() + j * 256 + k * 16) * float(I::scale(j));
                        transposed<ORDER>(v);
                        for (int j = 0; j < ORDER; j++)
                            _mm512_store_ps(rotated.data() + (k * entries + s.places[e * ORDER + j]) * 16, v[j]);
                    }
                }
                const int64_t count = std::min<int64_t>(16, s.out - n);
                for (int64_t k = 0; k < 16; k++) {
                    const int64_t c = sizes.channel(place + k);
                    if (c < s.in)
                        separate<bfloat16, float, 16>(rotated.data() + k * entries * 16, s.in * entries, count, entries,
                                                      filters + (n * s.in + c) * entries);
                }
            }
    }
}

// Where a group of 16 W channels of a tap is read: for each pose from the pixel's place, so many numbers behind it.
template <int ORDER>
struct Source {
    Source(const bfloat16 *const *places, const Shape &s, int64_t tiled, int64_t tap, int64_t c) {
        for (int g = 0; g < ORDER; g++)
            from[g] = places + s.reads[g * s.taps() + tap] * tiled, behind[g] = g * s.in + c;
    }
    template <int W, bool FULL>
    void load(int64_t pixel, uint32_t mask, V (&v)[W][ORDER]) const {
#pragma GCC unroll 8
        for (int g = 0; g < ORDER; g++) {
            V both[W];
            widen<W, FULL>(from[g][pixel] + behind[g], mask, both);
            for (int w = 0; w < W; w++) v[w][g] = both[w];
        }
        for (int w = 0; w < W; w++) transform<ORDER>(v[w]);
    }
    const bfloat16 *const *from[ORDER];
    int64_t behind[ORDER];
};

// Gathers and transforms blocks first .. last of the rows of the patches of a tile: (|H|, pixels / 16, rows / 32).
template <int ORDER, int W, bool FULL>
void gather(const bfloat16 *const *places, int64_t tiled, const Shape &s, const Sizes<ORDER> &sizes, int64_t count,
            int64_t first, int64_t last, int64_t component, uint16_t *patches) {
    const int64_t groups = sizes.channels / (16 * W), all = s.taps() * groups, step = (last - first) * block;
    const int64_t begin = first * 2 / W, end = std::min(last * 2 / W, all);
    // Few pixels at a time, whose taps share what the first cache holds.
    for (int64_t p = 0; p < count; p += 16)
        for (int64_t group = begin; group < end; group++) {
            const int64_t c = group % groups * 16 * W, at = (group - begin) * W;
            const Source<ORDER> source(places, s, tiled, group / groups, c);
            const uint32_t mask = mask_of(s.in - c);
            uint16_t *to = patches + p / 16 * step + at / 2 * block + at % 2 * 16;
            const int64_t until = std::min(p + 16, count);
            for (int64_t i = p; i < until; i++, to += 32) {
                V v[W][ORDER], both[W];
                source.template load<W, FULL>(i, mask, v);
#pragma GCC unroll 8
                for (int j = 0; j < ORDER; j++) {
                    for (int w = 0; w < W; w++) both[w] = v[w][j];
                    narrow<W>(both, to + j * component);
                }
            }
        }
    if (last * 2 / W > all)  // half a block is left
        for (int j = 0; j < ORDER; j++)
            for (int64_t p = 0; p < count; p++)
                std::memset(patches + j * component + p / 16 * step + step - block + p % 16 * 32 + 16, 0, 32);
}

// The same as right factors of sums over pixels, a multiple of 32: (|H|, rows / 16, pixels / 32).
template <int ORDER, int W, bool FULL>
void gather_pairs(const bfloat16 *const *places, int64_t tiled, const Shape &s, const Sizes<ORDER> &sizes,
                  int64_t count, int64_t first, int64_t last, int64_t line, int64_t component, uint16_t *patches) {
    const int64_t groups = sizes.channels / (16 * W);
    for (int64_t p = 0; p < count; p += 32)
        for (int64_t group = first / W; group < last / W; group++) {
            const int64_t c = group % groups * 16 * W;
            const Source<ORDER> source(places, s, tiled, group / groups, c);
            const uint32_t mask = mask_of(s.in - c);
            uint16_t *to = patches + (group * W - first) * line + p * 16;
            for (int64_t i = p; i < p + 32; i += 2, to += 32)
#pragma GCC unroll 2
                for (int w = 0; w < W; w++) {
                    V v[2][ORDER];  // as many as there are registers for
                    for (int n = 0; n < 2; n++) {
                        V both[W][ORDER];
                        source.template load<W, FULL>(i + n, mask, both);
#pragma GCC unroll 8
                        for (int j = 0; j < ORDER; j++) v[n][j] = both[w][j];
                    }
#pragma GCC unroll 8
                    for (int j = 0; j < ORDER; j++)
                        _mm512_store_si512(to + j * component + w * line, zip(v[0][j], v[1][j]));
                }
        }
}

// What a thread keeps from call to call.
struct Kept {
    Buffer<uint16_t> patches, packed, grads;
    Buffer<float> sums, gradients;
    Buffer<const bfloat16 *> places;
    Buffer<bfloat16> zeros;
};
inline Kept &kept_by_thread() {
    static thread_local Kept kept;
    return kept;
}

// Transforms 16 W columns of the sums of a tile back, those from c on, and adds the bias.
template <int ORDER, int W>
void scatter(const float *sums, int64_t line, int64_t component, int64_t pixels, const bfloat16 *bias, int64_t c,
             int64_t channels, bfloat16 *out) {
    const uint32_t mask = mask_of(channels - c);
    V offset[W];
    for (int w = 0; w < W; w++) {
        offset[w] = _mm512_setzero_ps();
        if (bias) widen<1>(bias + c + 16 * w, mask >> 16 * w, offset + w);
    }
    out += c;
    for (int64_t p = 0; p < pixels; p++, sums += 16, out += ORDER * channels) {
        V v[W][ORDER];
#pragma GCC unroll 2
        for (int w = 0; w < W; w++) {
#pragma GCC unroll 8
            for (int j = 0; j < ORDER; j++) v[w][j] = _mm512_load_ps(sums + j * component + w * line);
            v[w][0] += offset[w];
            transposed<ORDER>(v[w]);
        }
#pragma GCC unroll 8
        for (int g = 0; g < ORDER; g++)
            if constexpr (W == 2)
                _mm512_mask_storeu_epi16(out + g * channels, mask, (__m512i)_mm512_cvtne2ps_pbh(v[1][g], v[0][g]));
            else
                _mm256_mask_storeu_epi16(out + g * channels, __mmask16(mask), (__m256i)_mm512_cvtneps_pbh(v[0][g]));
    }
}

template <int ORDER, int W, bool FULL>
void correlate(const bfloat16 *field, const uint16_t *packed, const bfloat16 *bias, const bfloat16 *zeros,
               const Shape &s, const Sizes<ORDER> &sizes, bfloat16 *out, int threads) {
    using I = Irreps<ORDER>;
    const int64_t total = s.batch * s.pixels(), parts = (sizes.rows / 32 + deepest - 1) / deepest;
    const int64_t deep = (sizes.rows / 32 + parts - 1) / parts;
    const int64_t each = ORDER * (deep * 64 + sizes.out * 4);  // bytes of a pixel
    const bool large = sizes.size * block * int64_t(sizeof(uint16_t)) > many;
    const int64_t most = std::clamp<int64_t>((large ? spread : held) / each / 32 * 32, 32, 512);
    const int64_t tiles = (total + most - 1) / most, size = std::min(most, padded((total + tiles - 1) / tiles, 16));
    const int64_t count = (total + size - 1) / size, component = size * deep * 32 + apart;
    const int64_t line = size * 16 + 16;  // of 16 columns of the sums, not to share places in the cache
#pragma omp parallel num_threads(threads) if (count > 1)
    {
        Kept &kept = kept_by_thread();
        uint16_t *patches = kept.patches.reserve(ORDER * component);
        float *sums = kept.sums.reserve(ORDER * sizes.out / 16 * line);
        const bfloat16 **places = kept.places.reserve(size * s.taps());
        const FlushSubnormals flush;
        const Registers registers;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++) {
            const int64_t begin = t * size, pixels = std::min(size, total - begin), lines = (pixels + 15) / 16;
            locate<bfloat16, ORDER>(field, zeros, s, begin, pixels, 1, size, places);
            Ahead ahead(pixels_of(out, ORDER * s.out, begin, pixels),
                        field_of_tile(field, ORDER, s, begin + pixels, pixels),
                        (lines + 1) / 2 * sizes.products() * (sizes.rows / 32));
            for (int64_t row = 0; row < sizes.rows / 32; row += deep) {
                const int64_t end = std::min(row + deep, sizes.rows / 32), rows = end - row;
                gather<ORDER, W, FULL>(places, size, s, sizes, pixels, row, end, component, patches);
                for (int b = 0; b < I::count; b++)
                    for (int64_t n = 0; n < sizes.columns(b); n += 2) {
                        const int64_t wide = std::min<int64_t>(2, sizes.columns(b) - n);
                        const Steps steps{rows * block, block, block, wide * block, 256, line};
                        for (int part = 0; part < I::parts(b); part++)
                            for (int copy = 0; copy < I::copies(b); copy++) {
                                const int64_t first = b + copy * I::parts(b);
                                const uint16_t *left = patches + (first + part) * component;
                                const uint16_t *right = packed + sizes.at(b, part, row, n) * block;
                                float *to = sums + (first * sizes.out / 16 + n) * line;
                                for (int64_t m = 0; m < lines; m += 2)
                                    multiply(left + m * rows * block, right, to + m * 256, steps, lines - m, wide, rows,
                                             row + part == 0, ahead.next(rows));
                            }
                    }
            }
            for (int64_t p = 0; p < pixels; p += 16)
                for (int64_t c = 0; c < s.out; c += 32) {
                    const float *from = sums + c / 16 * line + p * 16;
                    bfloat16 *to = out + (begin + p) * ORDER * s.out;
                    const int64_t some = std::min<int64_t>(16, pixels - p), all = sizes.out / 16 * line;
                    if (s.out - c > 16)
                        scatter<ORDER, 2>(from, line, all, some, bias, c, s.out, to);
                    else
                        scatter<ORDER, 1>(from, line, all, some, bias, c, s.out, to);
                }
        }
    }
}

// Gradients of a tile as left factors of sums over pixels: (|H|, outputs / 16, pixels / 32).
template <int ORDER>
void gather_gradients(const bfloat16 *const *places, const Shape &s, const Sizes<ORDER> &sizes, int64_t count,
                      uint16_t *grads) {
    alignas(64) uint32_t lines[ORDER][256];
    for (int64_t p = 0; p < count; p += 32)
        for (int64_t c = 0; c < sizes.out; c += 16) {
            const uint32_t mask = mask_of(s.out - c) & 0xffff;
            for (int i = 0; i < 16; i++) {
                V one[ORDER], two[ORDER];
                for (int g = 0; g < ORDER; g++) {
                    widen<1>(places[p + 2 * i] + g * s.out + c, mask, one + g);
                    widen<1>(places[p + 2 * i + 1] + g * s.out + c, mask, two + g);
                }
                transform<ORDER>(one), transform<ORDER>(two);
                for (int j = 0; j < ORDER; j++) _mm512_store_si512(lines[j] + i * 16, zip(one[j], two[j]));
            }
            for (int j = 0; j < ORDER; j++) {
                uint16_t *to = grads + (((j * sizes.out + c) / 16) * (count / 32) + p / 32) * block;
                transpose<float>(reinterpret_cast<const float *>(lines[j]), 16, 16, 16, reinterpret_cast<float *>(to),
                                 16);
            }
        }
}

template <int ORDER, int W, bool FULL>
void correlate_filters(const bfloat16 *field, const bfloat16 *grad, const bfloat16 *zeros, const Shape &s,
                       const Sizes<ORDER> &sizes, float *sums, int threads) {
    using I = Irreps<ORDER>;
    const int64_t total = s.batch * s.pixels(), most = 256;
    const int64_t tiles = (total + most - 1) / most, size = padded((total + tiles - 1) / tiles, 32);
    const int64_t count = (total + size - 1) / size, all = sizes.rows / 16;
    const int64_t deep = std::clamp<int64_t>(held / (ORDER * size * 32) / 2 * 2, 2, all);
    const int64_t line = size * 16 + apart, component = deep * line;
#pragma omp parallel num_threads(threads)
    {
        Kept &kept = kept_by_thread();
        uint16_t *patches = kept.patches.reserve(ORDER * component);
        uint16_t *grads = kept.grads.reserve(ORDER * size * sizes.out);
        const bfloat16 **places = kept.places.reserve(size * (s.taps() + 1)), **grad_places = places + size * s.taps();
        const FlushSubnormals flush;
        const Registers registers;
        float *own = sums + thread() * sizes.size * block;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++) {
            const int64_t begin = t * size, pixels = std::min(size, total - begin), filled = padded(pixels, 32);
            locate<bfloat16, ORDER>(field, zeros, s, begin, pixels, 1, size, places);
            for (int64_t e = 0; e < s.taps(); e++)
                std::fill(places + e * size + pixels, places + e * size + filled, zeros);
            for (int64_t p = 0; p < filled; p++)
                grad_places[p] = p < pixels ? grad + (begin + p) * ORDER * s.out : zeros;
            gather_gradients<ORDER>(grad_places, s, sizes, filled, grads);
            const int64_t used = s.taps() * sizes.channels / 16, sum = filled / 32, after = begin + pixels;
            Ahead ahead(pixels_of(grad, ORDER * s.out, after, std::min(pixels, total - after)),
                        field_of_tile(field, ORDER, s, after, pixels),
                        (used + 1) / 2 * sizes.products() * sum);
            for (int64_t row = 0; row < used; row += deep) {
                const int64_t end = std::min(row + deep, used);
                gather_pairs<ORDER, W, FULL>(places, size, s, sizes, filled, row, end, line, component, patches);
                for (int b = 0; b < I::count; b++) {
                    const int64_t columns = sizes.columns(b), grad_line = sum * block;
                    const Steps steps{grad_line, block, line, block, 256, columns * 256};
                    for (int part = 0; part < I::parts(b); part++)
                        for (int64_t n = 0; n < columns; n += 2)
                            for (int64_t k = row; k < end; k += 2) {
                                float *to = own + sizes.gradient_at(b, part, k, n) * 256;
                                for (int copy = 0; copy < I::copies(b); copy++) {
                                    const int first = b + copy * I::parts(b);
                                    multiply(grads + (first * sizes.out / 16 + n) * grad_line,
                                             patches + (first + part) * component + (k - row) * line, to, steps,
                                             columns - n, end - k, sum, false, ahead.next(sum));
                                }
                            }
                }
            }
        }
    }
}

// Calls f(W, FULL): how many vectors of channels are read at a time, and whether all are full.
template <int ORDER, typename F>
void by_channels(const Sizes<ORDER> &sizes, int64_t channels, F &&f) {
    using Two = std::integral_constant<int, 2>;
    using One = std::integral_constant<int, 1>;
    if (sizes.whole) return sizes.channels == channels ? f(Two{}, std::true_type{}) : f(Two{}, std::false_type{});
    return sizes.channels == channels ? f(One{}, std::true_type{}) : f(One{}, std::false_type{});
}

template <typename S, typename T, int ORDER>
void run(const bfloat16 *field, const bfloat16 *filters, const bfloat16 *bias, bfloat16 *out, const Shape &s, bool last,
         bool swapped, int threads) {
    const Sizes<ORDER> sizes(s);
    Kept &kept = kept_by_thread();
    Buffer<uint16_t> more_packed;
    uint16_t *packed = room(kept.packed, more_packed, sizes.size * block);
    const bfloat16 *zeros = zeroed(kept.zeros, ORDER * s.in);
    pack<ORDER>(filters, s, swapped, sizes, packed, threads);
    const auto correlated = [&](const Shape &one, const bfloat16 *x, bfloat16 *y) {
        by_channels(sizes, s.in, [&](auto vectors, auto full) {
            constexpr int W = decltype(vectors)::value;
            correlate<ORDER, W, decltype(full)::value>(x, packed, bias, zeros, one, sizes, y, threads);
        });
    };
    if (last) return correlated(s, field, out);
    in_parts<bfloat16, float, ORDER>(field, out, s, threads, correlated);
}

template <typename S, typename T, int ORDER>
void run_filters(const bfloat16 *field, const bfloat16 *grad, bfloat16 *filters, const Shape &s, bool last,
                 int threads) {
    const Sizes<ORDER> sizes(s);
    Kept &kept = kept_by_thread();
    Buffer<float> more_sums;
    const int64_t size = sizes.size * block;
    float *sums = room(kept.gradients, more_sums, threads * size);
    std::memset(sums, 0, threads * size * sizeof(float));
    const bfloat16 *zeros = zeroed(kept.zeros, ORDER * std::max(s.in, s.out));
    const auto add = [&](const Shape &one, const bfloat16 *x, const bfloat16 *dy) {
        by_channels(sizes, s.in, [&](auto vectors, auto full) {
            constexpr int W = decltype(vectors)::value;
            correlate_filters<ORDER, W, decltype(full)::value>(x, dy, zeros, one, sizes, sums, threads);
        });
    };
    if (last)
        add(s, field, grad);
    else
        in_parts<bfloat16, float, ORDER>(field, grad, s, threads, add);
    for (int64_t thread = 1; thread < threads; thread++)
        for (int64_t i = 0; i < size; i++) sums[i] += sums[thread * size + i];
    unpack<ORDER>(sums, s, sizes, filters, threads);
}

}  // namespace halves
}  // namespace

#endif
