// Affine local attention, forward and backward, one head of one image at a time.
//
// Planes are copied into scratch with r = k/2 zeros behind every row and r rows of zeros above and below. In this flat
// layout the neighbor of pixel i at offset d is pixel i + shift(d), without a branch, and vectors cross the ends of
// rows, so that small images fill them too. The padding at the ends of rows is computed like queries and discarded;
// its gradients are 0 because that of the output is 0 there.
//
// Scratch is a few planes of one head, and the scores of a tile (forward) or of a band (backward) of pixels; for fields
// with channels last also the planes of a few images.

// Sums are taken in the order that is written: it is the fastest one here, and `power_of_two` depends on it.
#if defined(__clang__)
#pragma clang fp reassociate(off)
#else
#pragma GCC optimize("no-associative-math")
#endif

#include <memory>
#include <utility>
#include <vector>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "simd.h"

namespace {

// The bytes of the weights of a band, and of the gradients of its scores: with the planes they fit a cache of 1 MB.
constexpr int64_t BAND_BYTES = 240 * 1024;

// The bytes of the fields of a block of images: they fit a cache of 2 MB.
constexpr int64_t BLOCK_BYTES = 1024 * 1024;

constexpr double LOG_2 = 0.69314718055994530942;

template <class S, class T> inline void convert(const S *__restrict from, T *__restrict to, int64_t count) {
    if constexpr (std::is_same_v<S, T>) {
        std::memcpy(to, from, count * sizeof(T));
    } else {
        for (int64_t i = 0; i < count; i++) downcast(upcast(from[i]), to + i);
    }
}

// Zero-initialized memory, aligned to a cache line.
template <class T> class Buffer {
  public:
    explicit Buffer(int64_t size) : memory(new char[size * sizeof(T) + 64]) {
        start = reinterpret_cast<T *>((reinterpret_cast<uintptr_t>(memory.get()) + 63) / 64 * 64);
        std::fill(start, start + size, T(0));
    }
    operator T *() const { return start; }

  private:
    std::unique_ptr<char[]> memory;
    T *start;
};

template <class T> struct Sizes {
    int64_t batch, channels, order, height, width, k, heads, size, offsets;
    int64_t stride, origin, pixels, tile, band, padded;
    std::vector<int64_t> shift;

    Sizes(int64_t batch, int64_t channels, int64_t order, int64_t height, int64_t width, int64_t k, int64_t heads)
        : batch(batch), channels(channels), order(order), height(height), width(width), k(k), heads(heads),
          size(channels / heads), offsets(k * k), stride(width + k / 2), origin((k / 2) * (stride + 1)) {
        tile = lanes<T> * (order == 1 ? 4 : 2);
        int64_t flat = round_up(height * stride, tile);
        int64_t most = std::max(tile, BAND_BYTES / int64_t(sizeof(T)) / (offsets * order) / tile * tile);
        int64_t bands = (flat + most - 1) / most;
        band = round_up((flat + bands - 1) / bands, tile);
        pixels = band * bands;
        padded = pixels + 2 * origin;
        for (int64_t d = 0; d < offsets; d++) shift.push_back(d / k * stride + d % k);
    }

    int64_t plane() const { return height * width; }

    // The offset of the planes of one head of one image.
    int64_t field(int64_t image, int64_t head) const {
        return (image * channels + head * size) * order * plane();
    }

    template <class S> void pad(const S *from, T *to, int64_t pitch) const {
        for (int64_t f = 0; f < size * order; f++)
            for (int64_t y = 0; y < height; y++)
                convert(from + (f * height + y) * width, to + f * pitch + y * stride, width);
    }

    template <class S> void crop(const T *from, S *to, int64_t pitch) const {
        for (int64_t f = 0; f < size * order; f++)
            for (int64_t y = 0; y < height; y++)
                convert(from + f * pitch + y * stride, to + (f * height + y) * width, width);
    }
};

// Transposes a block of N x N numbers, a vector a row.
template <class S> struct Block {
    static constexpr int N = 16 / sizeof(S);
    typedef std::conditional_t<sizeof(S) == 2, uint16_t, std::conditional_t<sizeof(S) == 4, uint32_t, uint64_t>> Bits;
    typedef Bits Row __attribute__((vector_size(16)));

    static void transpose(Row (&rows)[N]) {
        for (int stage = 1; stage < N; stage *= 2) {
            Row next[N];
            for (int i = 0; i < N / 2; i++) {
                next[2 * i] = interleaved(rows[i], rows[i + N / 2], 0, std::make_integer_sequence<int, N>());
                next[2 * i + 1] = interleaved(rows[i], rows[i + N / 2], std::make_integer_sequence<int, N>());
            }
            for (int i = 0; i < N; i++) rows[i] = next[i];
        }
    }

  private:
    template <int... I> static Row interleaved(Row a, Row b, int, std::integer_sequence<int, I...>) {
        return shuffled<(I % 2 * N + I / 2)...>(a, b);
    }
    template <int... I> static Row interleaved(Row a, Row b, std::integer_sequence<int, I...>) {
        return shuffled<(I % 2 * N + N / 2 + I / 2)...>(a, b);
    }
};

// One image from (C, R, pixels), planes first, to (pixels, R, C), planes last, or back.
template <bool TO_LAST, class S>
void lay_out(const S *from, S *to, int64_t channels, int64_t order, int64_t pixels) {
    using B = Block<S>;
    constexpr int N = B::N;
    // Some cache lines of pixels at a time, so that what is read with gaps is read once.
    constexpr int64_t RUN = 64 / sizeof(S);
    const int64_t planes = channels * order;
    for (int64_t begin = 0; begin < pixels; begin += RUN)
        for (int64_t j = 0; j < planes; j += N) {
            const int64_t columns = std::min<int64_t>(N, planes - j), end = std::min(pixels, begin + RUN);
            int64_t plane[N], c = j % channels, element = j / channels, i = begin;
            for (int64_t r = 0; r < columns; r++) {
                plane[r] = (c * order + element) * pixels;
                if (++c == channels) c = 0, element++;
            }
            for (; columns == N && i + N <= end; i += N) {
                typename B::Row rows[N];
                for (int r = 0; r < N; r++)
                    std::memcpy(&rows[r], from + (TO_LAST ? plane[r] + i : (i + r) * planes + j), sizeof rows[r]);
                B::transpose(rows);
                for (int r = 0; r < N; r++)
                    std::memcpy(to + (TO_LAST ? (i + r) * planes + j : plane[r] + i), &rows[r], sizeof rows[r]);
            }
            for (int64_t r = 0; r < columns; r++)
                for (int64_t x = i; x < end; x++)
                    to[TO_LAST ? x * planes + j + r : plane[r] + x] = from[TO_LAST ? plane[r] + x : x * planes + j + r];
        }
}

// Fields of a block of images with planes first: where they lie in memory if they lie so there, or else in scratch.
// Each function is called by all threads of a team, which share its work.
template <class S> class Planes {
  public:
    template <class T>
    Planes(const Sizes<T> &s, std::vector<S *> fields, int64_t images, bool last)
        : fields(fields), channels(s.channels), order(s.order), pixels(s.plane()), images(images) {
        if (last) scratch.reset(new S[fields.size() * images * numbers()]);
    }

    // The first image of the block that begins at an image.
    S *at(int64_t field, int64_t begin) const {
        if (fields[field] == nullptr) return nullptr;
        return scratch ? scratch.get() + field * images * numbers() : fields[field] + begin * numbers();
    }

    void read(int64_t begin, int64_t end) const { copy<false>(begin, end); }

    void write(int64_t begin, int64_t end) const { copy<true>(begin, end); }

  private:
    std::vector<S *> fields;
    int64_t channels, order, pixels, images;
    std::unique_ptr<S[]> scratch;

    int64_t numbers() const { return channels * order * pixels; }

    template <bool TO_LAST> void copy(int64_t begin, int64_t end) const {
        if (!scratch) return;
#pragma omp for collapse(2) schedule(static)
        for (size_t field = 0; field < fields.size(); field++)
            for (int64_t image = begin; image < end; image++) {
                if (fields[field] == nullptr) continue;
                S *last = fields[field] + image * numbers(), *first = at(field, begin) + (image - begin) * numbers();
                lay_out<TO_LAST>(TO_LAST ? first : last, TO_LAST ? last : first, channels, order, pixels);
            }
    }
};

// The images of a block: the same number for all threads, with their planes in the cache.
template <class S, class T> int64_t block_of_images(const Sizes<T> &s, int64_t fields, int64_t threads, bool last) {
    const int64_t bytes = fields * s.channels * s.order * s.plane() * sizeof(S);
    return last ? std::min(s.batch, threads * std::max<int64_t>(1, BLOCK_BYTES / bytes)) : s.batch;
}

// The larger numbers; b where a is not a number.
template <class V> inline V larger(V a, V b) { return a > b ? a : b; }
#if defined(__AVX512F__)
// GCC does not find the instruction.
template <> inline Vector<float> larger(Vector<float> a, Vector<float> b) { return _mm512_max_ps(a, b); }
#endif

// 2^x of numbers up to 0, to about 1 ulp; below the smallest normal number it gives that. The nearest integer n lies in
// the last bits of x plus a number so large that no bits are left behind the point, 2^(x - n) is a polynomial, and n is
// added to its exponent.
inline Vector<float> power_of_two(Vector<float> x) {
    typedef uint32_t Bits __attribute__((vector_size(vector_bytes)));
    constexpr float large = 0x1.8p23f;
    x = larger(Vector<float>{} - 126.0f, x);
    const Vector<float> shifted = x + large, r = x - (shifted - large);
    Vector<float> y = r * 1.3264727065e-3f + 9.6715126489e-3f;
    y = y * r + 5.5507337437e-2f;
    y = y * r + 2.4022242085e-1f;
    y = y * r + 6.9314697760e-1f;
    y = y * r + 1.0f;
    return (Vector<float>)((Bits)y + ((Bits)shifted << 23));
}

inline Vector<double> power_of_two(Vector<double> x) {
    typedef uint64_t Bits __attribute__((vector_size(vector_bytes)));
    constexpr double large = 0x1.8p52;
    x = larger(Vector<double>{} - 1022.0, x);
    const Vector<double> shifted = x + large, r = (x - (shifted - large)) * LOG_2;
    Vector<double> y = r / 13 + 1;  // the Taylor series: below 2^-53 for |r| <= ln(2) / 2
    for (int k = 12; k > 0; k--) y = y * r * (1.0 / k) + 1.0;
    return (Vector<double>)((Bits)y + ((Bits)shifted << 52));
}

// Tables with the offset before the elements, so that the loops read them contiguously:
// psi (C, P, R, d) becomes (C, d, P, R), and beta (C, P, d) becomes (C, d, P).
template <class T> std::vector<T> offset_first(const T *from, int64_t channels, int64_t elements, int64_t offsets) {
    std::vector<T> to(channels * elements * offsets);
    for (int64_t c = 0; c < channels; c++)
        for (int64_t e = 0; e < elements; e++)
            for (int64_t d = 0; d < offsets; d++)
                to[(c * offsets + d) * elements + e] = from[(c * elements + e) * offsets + d];
    return to;
}

template <class T> struct Map {
    std::vector<T> psi, beta;

    Map(const T *psi_from, const T *beta_from, int64_t channels, int64_t order, int64_t offsets) {
        if (psi_from == nullptr) return;
        psi = offset_first(psi_from, channels, order * order, offsets);
        beta = offset_first(beta_from, channels, order, offsets);
    }
};

// One head's work on a tile of W vectors of pixels, for N elements, B of them at a time.
template <class T, int N> struct Tile {
    static constexpr int W = N == 1 ? 4 : 2, B = N < 4 ? N : 4;
    static constexpr int64_t L = lanes<T>, T_ = W * L;
    using V = Vector<T>;

    // m(P) = beta(P) + sum over R of x(R) psi(P, R), for B elements P.
    static inline __attribute__((always_inline)) void map(
        V (&m)[B][W], const T *__restrict x, int64_t pitch, const T *__restrict psi, const T *__restrict beta
    ) {
        for (int p = 0; p < B; p++)
            for (int w = 0; w < W; w++) m[p][w] = V{} + beta[p];
        for (int r = 0; r < N; r++) {
            V in[W];
            for (int w = 0; w < W; w++) in[w] = load(x + r * pitch + w * L);
            for (int p = 0; p < B; p++)
                for (int w = 0; w < W; w++) m[p][w] += in[w] * psi[p * N + r];
        }
    }

    // dots(d, P) = sum over channels of u(P) m(d, P); stores m in kept (c, d, P, tile) and the maxima of dots over d in
    // top (P, tile) unless these are null.
    static void dots(
        T *__restrict dots, int64_t dots_pitch, int64_t channels, const T *__restrict u, int64_t u_pitch,
        const T *__restrict x, int64_t x_pitch, const T *__restrict psi, const T *__restrict beta,
        const std::vector<int64_t> &shift, T *__restrict kept, T *__restrict top
    ) {
        const int64_t offsets = shift.size();
        for (int b = 0; b < N; b += B) {
            V most[B][W];
            for (int p = 0; p < B; p++)
                for (int w = 0; w < W; w++) most[p][w] = V{} - std::numeric_limits<T>::infinity();
            for (int64_t d = 0; d < offsets; d++) {
                V dot[B][W] = {};
                for (int64_t c = 0; c < channels; c++) {
                    V m[B][W];
                    const int64_t row = (c * offsets + d) * N + b;
                    map(m, x + c * N * x_pitch + shift[d], x_pitch, psi + row * N, beta + row);
                    for (int p = 0; p < B; p++)
                        for (int w = 0; w < W; w++) {
                            dot[p][w] += load(u + (c * N + b + p) * u_pitch + w * L) * m[p][w];
                            if (kept) store<T>(kept + (row + p) * T_ + w * L, m[p][w]);
                        }
                }
                for (int p = 0; p < B; p++)
                    for (int w = 0; w < W; w++) {
                        store<T>(dots + (d * N + b + p) * dots_pitch + w * L, dot[p][w]);
                        most[p][w] = larger(most[p][w], dot[p][w]);
                    }
            }
            if (!top) continue;
            for (int p = 0; p < B; p++)
                for (int w = 0; w < W; w++) store<T>(top + (b + p) * T_ + w * L, most[p][w]);
        }
    }

    // The same where m was kept.
    static void dots_of_kept(
        T *__restrict dots, int64_t dots_pitch, int64_t channels, const T *__restrict u, int64_t u_pitch,
        const T *__restrict kept, int64_t offsets
    ) {
        for (int64_t row = 0; row < offsets * N; row++) {
            V dot[W] = {};
            for (int64_t c = 0; c < channels; c++)
                for (int w = 0; w < W; w++)
                    dot[w] += load(u + (c * N + row % N) * u_pitch + w * L) *
                              load(kept + (c * offsets * N + row) * T_ + w * L);
            for (int w = 0; w < W; w++) store<T>(dots + row * dots_pitch + w * L, dot[w]);
        }
    }

    // out(P) = factor(P) times the sum over d of a(d, P) m(d, P), for one channel.
    static void mix(
        T *__restrict out, int64_t out_pitch, const T *__restrict a, int64_t a_pitch, const T *__restrict factor,
        const T *__restrict x, int64_t x_pitch, const T *__restrict psi, const T *__restrict beta,
        const std::vector<int64_t> &shift
    ) {
        for (int b = 0; b < N; b += B) {
            V sum[B][W] = {};
            for (size_t d = 0; d < shift.size(); d++) {
                V m[B][W];
                map(m, x + shift[d], x_pitch, psi + (d * N + b) * N, beta + d * N + b);
                for (int p = 0; p < B; p++)
                    for (int w = 0; w < W; w++) sum[p][w] += load(a + (d * N + b + p) * a_pitch + w * L) * m[p][w];
            }
            for (int p = 0; p < B; p++)
                for (int w = 0; w < W; w++)
                    store<T>(out + (b + p) * out_pitch + w * L, sum[p][w] * load(factor + (b + p) * T_ + w * L));
        }
    }

    static void mix_of_kept(
        T *__restrict out, int64_t out_pitch, const T *__restrict a, int64_t a_pitch, const T *__restrict factor,
        const T *__restrict kept, int64_t offsets
    ) {
        for (int b = 0; b < N; b += B) {
            V sum[B][W] = {};
            for (int64_t d = 0; d < offsets; d++)
                for (int p = 0; p < B; p++)
                    for (int w = 0; w < W; w++) {
                        const int64_t row = d * N + b + p;
                        sum[p][w] += load(a + row * a_pitch + w * L) * load(kept + row * T_ + w * L);
                    }
            for (int p = 0; p < B; p++)
                for (int w = 0; w < W; w++)
                    store<T>(out + (b + p) * out_pitch + w * L, sum[p][w] * load(factor + (b + p) * T_ + w * L));
        }
    }

    // Scores become powers of two, top their maxima and inverse the inverse of their sums.
    static void exponentials(
        T *__restrict scores, int64_t pitch, const T *__restrict top, T *__restrict inverse, int64_t offsets
    ) {
        for (int64_t i = 0; i < N * T_; i += L) {
            T *s = scores + i / T_ * pitch + i % T_;
            const V most = load(top + i);
            V sum{};
            for (int64_t d = 0; d < offsets; d++) {
                const V e = power_of_two(load(s + d * N * pitch) - most);
                store<T>(s + d * N * pitch, e);
                sum += e;
            }
            store<T>(inverse + i, 1 / sum);
        }
    }

    // In place: scores become e, which the weights are times inverse, and the gradients g of the weights become
    // e (g - sum_d e g inverse), which those of the scores are times inverse.
    static void softmax_backward(
        T *__restrict scores, T *__restrict grads, int64_t pitch, const T *__restrict top, T *__restrict inverse,
        int64_t offsets
    ) {
        for (int64_t i = 0; i < N * T_; i += L) {
            const int64_t at = i / T_ * pitch + i % T_, step = N * pitch;
            T *__restrict s = scores + at, *__restrict g = grads + at;
            const V most = load(top + i);
            V sum{}, mean{};
            for (int64_t d = 0; d < offsets; d++) {
                const V e = power_of_two(load(s + d * step) - most);
                store<T>(s + d * step, e);
                sum += e;
                mean += e * load(g + d * step);
            }
            sum = 1 / sum;
            mean *= sum;
            store<T>(inverse + i, sum);
            for (int64_t d = 0; d < offsets; d++)
                store<T>(g + d * step, load(s + d * step) * (load(g + d * step) - mean));
        }
    }

    // x(P) *= factor inverse(P)
    static void multiply(T *__restrict x, int64_t pitch, const T *__restrict inverse, T factor) {
        for (int64_t i = 0; i < N * T_; i += L) {
            T *to = x + i / T_ * pitch + i % T_;
            store<T>(to, load(to) * (load(inverse + i) * factor));
        }
    }
};

// q(P) = scale (beta(P) + sum over R of Q(R) psi(P, R)) for one head. Callers include log2(e) in the scale, so that
// weights are powers of two.
template <class T, int N>
void queries(const Sizes<T> &s, T *q, const T *raw, const Map<T> &map, int64_t first, double scale) {
    for (int64_t c = 0; c < s.size; c++)
        for (int p = 0; p < N; p++) {
            const T *psi = map.psi.data() + ((first + c) * N + p) * N;
            const T beta = map.beta[(first + c) * N + p];
            T *__restrict to = q + (c * N + p) * s.pixels;
            const T *__restrict from = raw + c * N * s.pixels;
            for (int64_t i = 0; i < s.pixels; i++) {
                T sum = beta;
                for (int r = 0; r < N; r++) sum += from[r * s.pixels + i] * psi[r];
                to[i] = T(scale) * sum;
            }
        }
}

template <class T, int N, class S>
void forward(
    const Sizes<T> &s, S *query, S *key, S *value, const Map<T> &query_map, const Map<T> &key_map,
    const Map<T> &value_map, double scale, S *out, bool last, int64_t threads
) {
    using Own = Tile<T, N>;
    const int64_t per_psi = s.offsets * N * N, per_beta = s.offsets * N, tile = Own::T_;
    const int64_t block = block_of_images<S>(s, 4, threads, last);
    const Planes<S> in(s, {query, key, value}, block, last), outs(s, {out}, block, last);
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        const int64_t fields = s.size * N;
        Buffer<T> raw(fields * s.pixels), q(fields * s.pixels), y(fields * s.pixels), keys(fields * s.padded);
        Buffer<T> values(value ? fields * s.padded : 0), kept(value ? 0 : s.size * per_beta * tile);
        Buffer<T> scores(per_beta * tile), inverse(N * tile), top(N * tile);
        for (int64_t begin = 0; begin < s.batch; begin += block) {
            const int64_t end = std::min(s.batch, begin + block);
            in.read(begin, end);
#pragma omp for collapse(2) schedule(static)
            for (int64_t head = 0; head < s.heads; head++)
                for (int64_t image = begin; image < end; image++) {
                    const int64_t at = s.field(image - begin, head), first = head * s.size;
                    s.pad(in.at(0, begin) + at, raw, s.pixels);
                    s.pad(in.at(1, begin) + at, keys + s.origin, s.padded);
                    if (value) s.pad(in.at(2, begin) + at, values + s.origin, s.padded);
                    queries<T, N>(s, q, raw, query_map, first, scale / LOG_2);
                    for (int64_t i = 0; i < s.pixels; i += tile) {
                        Own::dots(
                            scores, tile, s.size, q + i, s.pixels, keys + i, s.padded,
                            key_map.psi.data() + first * per_psi, key_map.beta.data() + first * per_beta, s.shift,
                            value ? nullptr : kept + 0, top
                        );
                        Own::exponentials(scores, tile, top, inverse, s.offsets);
                        for (int64_t c = 0; c < s.size; c++) {
                            T *to = y + c * N * s.pixels + i;
                            if (value)
                                Own::mix(
                                    to, s.pixels, scores, tile, inverse, values + c * N * s.padded + i, s.padded,
                                    value_map.psi.data() + (first + c) * per_psi,
                                    value_map.beta.data() + (first + c) * per_beta, s.shift
                                );
                            else
                                Own::mix_of_kept(
                                    to, s.pixels, scores, tile, inverse, kept + c * per_beta * tile, s.offsets
                                );
                        }
                    }
                    s.crop(y, outs.at(0, begin) + at, s.pixels);
                }
            outs.write(begin, end);
        }
    }
}

// One channel of a band: with dm(P) = a(P) u(P) (+ b(P) v(P)) the gradient of a mapped neighbor, adds to the gradients
// of the field, dx(R) += sum over P of dm(P) psi(P, R), and to those of psi and beta, which stay vectors until the
// sum over lanes at the end.
template <class T, int N, bool TWO>
void add_gradients(
    const Sizes<T> &s, const T *__restrict a, const T *__restrict u, const T *__restrict b, const T *__restrict v,
    const T *__restrict x, T *__restrict dx, const T *__restrict psi, T *__restrict dpsi, T *__restrict dbeta,
    T *__restrict dm
) {
    constexpr int B = Tile<T, N>::B;
    constexpr int64_t L = lanes<T>;
    using V = Vector<T>;
    // Columns first, so that a sum is not read right after it was stored, while the store is still in flight.
    for (int64_t column = 0; column < s.k; column++)
        for (int64_t row = 0; row < s.k; row++) {
            const int64_t d = row * s.k + column;
            for (int p0 = 0; p0 < N; p0 += B) {
                const T *__restrict as = a + (d * N + p0) * s.band, *__restrict us = u + p0 * s.pixels;
                const T *__restrict bs = TWO ? b + (d * N + p0) * s.band : nullptr;
                const T *__restrict vs = TWO ? v + p0 * s.pixels : nullptr;
                // Two loops, each of which keeps its sums and factors in registers.
                for (int r0 = 0; r0 < N; r0 += B) {
                    const T *__restrict xs = x + r0 * s.padded + s.shift[d];
                    V filters[B][B] = {}, shifts[B] = {};
                    for (int64_t i = 0; i < s.band; i += L) {
                        V m[B];
                        for (int p = 0; p < B; p++) {
                            if (r0 > 0) {
                                m[p] = load(dm + p * s.band + i);
                                continue;
                            }
                            m[p] = load(as + p * s.band + i) * load(us + p * s.pixels + i);
                            if (TWO) m[p] += load(bs + p * s.band + i) * load(vs + p * s.pixels + i);
                            store<T>(dm + p * s.band + i, m[p]);
                            shifts[p] += m[p];
                        }
                        for (int r = 0; r < B; r++) {
                            const V in = load(xs + r * s.padded + i);
                            for (int p = 0; p < B; p++) filters[p][r] += m[p] * in;
                        }
                    }
                    for (int p = 0; p < B; p++) {
                        const int64_t at = d * N + p0 + p;
                        for (int r = 0; r < B; r++) {
                            T *to = dpsi + (at * N + r0 + r) * L;
                            store<T>(to, load(to) + filters[p][r]);
                        }
                        if (r0 == 0) store<T>(dbeta + at * L, load(dbeta + at * L) + shifts[p]);
                    }
                }
                for (int r0 = 0; r0 < N; r0 += B) {
                    T *__restrict dxs = dx + r0 * s.padded + s.shift[d];
                    V filter[B][B];
                    for (int p = 0; p < B; p++)
                        for (int r = 0; r < B; r++) filter[p][r] = V{} + psi[(d * N + p0 + p) * N + r0 + r];
                    for (int64_t i = 0; i < s.band; i += L) {
                        V m[B];
                        for (int p = 0; p < B; p++) m[p] = load(dm + p * s.band + i);
                        for (int r = 0; r < B; r++) {
                            V sum = load(dxs + r * s.padded + i);
                            for (int p = 0; p < B; p++) sum += m[p] * filter[p][r];
                            store<T>(dxs + r * s.padded + i, sum);
                        }
                    }
                }
            }
        }
}

// The gradients of a map's psi (C, P, R, d) and beta (C, P, d), one for each part of the batch.
template <class T> struct Parts {
    std::vector<T> psi, beta;
    int64_t channels, order, offsets;

    Parts(int64_t parts, int64_t channels, int64_t order, int64_t offsets)
        : psi(parts * channels * order * order * offsets), beta(parts * channels * order * offsets),
          channels(channels), order(order), offsets(offsets) {}

    // Adds the sums of one head, (c, d, P, R, lane) and (c, d, P, lane), and clears them.
    void take(T *lanes_psi, T *lanes_beta, int64_t part, int64_t first, int64_t size) {
        put(psi, lanes_psi, part, first, size, order * order);
        put(beta, lanes_beta, part, first, size, order);
    }

    void sum(T *to_psi, T *to_beta) const {
        add(psi, to_psi, channels * order * order * offsets);
        add(beta, to_beta, channels * order * offsets);
    }

  private:
    void put(std::vector<T> &to, T *sums, int64_t part, int64_t first, int64_t size, int64_t elements) {
        constexpr int64_t L = lanes<T>;
        for (int64_t c = 0; c < size; c++)
            for (int64_t d = 0; d < offsets; d++)
                for (int64_t e = 0; e < elements; e++)
                    to[((part * channels + first + c) * elements + e) * offsets + d] +=
                        lane_sum<T>(sums + ((c * offsets + d) * elements + e) * L);
        std::fill(sums, sums + size * offsets * elements * L, T(0));
    }

    static void add(const std::vector<T> &from, T *to, int64_t count) {
        std::fill(to, to + count, T(0));
        for (size_t i = 0; i < from.size(); i++) to[i % count] += from[i];
    }
};

template <class T, int N, class S>
void backward(
    const Sizes<T> &s, S *grad, S *query, S *key, S *value, const Map<T> &query_map, const Map<T> &key_map,
    const Map<T> &value_map, double scale, S *grad_query, S *grad_key, S *grad_value, Parts<T> &query_parts,
    Parts<T> &key_parts, Parts<T> &value_parts, int64_t parts, bool last, int64_t threads
) {
    using Own = Tile<T, N>;
    constexpr int64_t L = lanes<T>;
    using V = Vector<T>;
    const int64_t block = block_of_images<S>(s, 7, threads, last);
    const Planes<S> in(s, {grad, query, key, value}, block, last);
    const Planes<S> outs(s, {grad_query, grad_key, grad_value}, block, last);
    const int64_t per_psi = s.offsets * N * N, per_beta = s.offsets * N, tile = Own::T_;
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        const int64_t fields = s.size * N, in_lanes = s.size * L;
        Buffer<T> raw(fields * s.pixels), q(fields * s.pixels), g(fields * s.pixels), dq(fields * s.pixels);
        Buffer<T> keys(fields * s.padded), dkeys(fields * s.padded);
        Buffer<T> values(value ? fields * s.padded : 0), dvalues(value ? fields * s.padded : 0);
        Buffer<T> weights(per_beta * s.band), dscores(per_beta * s.band), kept(s.size * per_beta * tile);
        Buffer<T> inverse(N * tile), top(N * tile), factor(N * tile), mapped(Own::B * s.band);
        Buffer<T> query_psi(N * N * in_lanes), query_beta(N * in_lanes);
        Buffer<T> key_psi(per_psi * in_lanes), key_beta(per_beta * in_lanes);
        Buffer<T> value_psi(value ? per_psi * in_lanes : 0), value_beta(value ? per_beta * in_lanes : 0);
        for (int64_t begin = 0; begin < s.batch; begin += block) {
            const int64_t end = std::min(s.batch, begin + block);
            in.read(begin, end);
#pragma omp for collapse(2) schedule(static)
            for (int64_t head = 0; head < s.heads; head++)
                for (int64_t part = 0; part < parts; part++) {
                    const int64_t first = head * s.size;
                    const int64_t images = end - begin;
                    for (int64_t image = images * part / parts; image < images * (part + 1) / parts; image++) {
                        const int64_t at = s.field(image, head);
                        s.pad(in.at(0, begin) + at, g, s.pixels);
                        s.pad(in.at(1, begin) + at, raw, s.pixels);
                        s.pad(in.at(2, begin) + at, keys + s.origin, s.padded);
                        if (value) s.pad(in.at(3, begin) + at, values + s.origin, s.padded);
                        queries<T, N>(s, q, raw, query_map, first, scale / LOG_2);
                        std::fill(dkeys + 0, dkeys + fields * s.padded, T(0));
                        if (value) std::fill(dvalues + 0, dvalues + fields * s.padded, T(0));
                        for (int64_t start = 0; start < s.pixels; start += s.band) {
                            for (int64_t i = start; i < start + s.band; i += tile) {
                                T *a = weights + (i - start), *da = dscores + (i - start);
                                Own::dots(
                                    a, s.band, s.size, q + i, s.pixels, keys + i, s.padded,
                                    key_map.psi.data() + first * per_psi, key_map.beta.data() + first * per_beta,
                                    s.shift, kept, top
                                );
                                if (value)
                                    Own::dots(
                                        da, s.band, s.size, g + i, s.pixels, values + i, s.padded,
                                        value_map.psi.data() + first * per_psi,
                                        value_map.beta.data() + first * per_beta, s.shift, nullptr, nullptr
                                    );
                                else
                                    Own::dots_of_kept(da, s.band, s.size, g + i, s.pixels, kept, s.offsets);
                                Own::softmax_backward(a, da, s.band, top, inverse, s.offsets);
                                for (int64_t j = 0; j < N * tile; j++) factor[j] = T(scale) * inverse[j];
                                for (int64_t c = 0; c < s.size; c++)
                                    Own::mix_of_kept(
                                        dq + c * N * s.pixels + i, s.pixels, da, s.band, factor,
                                        kept + c * per_beta * tile, s.offsets
                                    );
                                // What the gradients of mapped neighbors are multiples of: q back in base e.
                                for (int64_t c = 0; c < s.size; c++) {
                                    Own::multiply(q + c * N * s.pixels + i, s.pixels, inverse, T(LOG_2));
                                    Own::multiply(g + c * N * s.pixels + i, s.pixels, inverse, T(1));
                                }
                            }
                            for (int64_t c = 0; c < s.size; c++) {
                                const int64_t own = c * N * s.pixels + start, pad = c * N * s.padded + start;
                                const T *psi = key_map.psi.data() + (first + c) * per_psi;
                                T *dpsi = key_psi + c * per_psi * L, *dbeta = key_beta + c * per_beta * L;
                                if (value) {
                                    add_gradients<T, N, false>(
                                        s, dscores, q + own, nullptr, nullptr, keys + pad, dkeys + pad, psi, dpsi,
                                        dbeta, mapped
                                    );
                                    add_gradients<T, N, false>(
                                        s, weights, g + own, nullptr, nullptr, values + pad, dvalues + pad,
                                        value_map.psi.data() + (first + c) * per_psi, value_psi + c * per_psi * L,
                                        value_beta + c * per_beta * L, mapped
                                    );
                                } else {
                                    add_gradients<T, N, true>(
                                        s, dscores, q + own, weights, g + own, keys + pad, dkeys + pad, psi, dpsi,
                                        dbeta, mapped
                                    );
                                }
                            }
                        }
                        // Through the map of the queries, in place.
                        for (int64_t c = 0; c < s.size; c++) {
                            const T *psi = query_map.psi.data() + (first + c) * N * N;
                            T *x = raw + c * N * s.pixels, *dm = dq + c * N * s.pixels;
                            for (int64_t i = 0; i < s.pixels; i += L) {
                                V in[N], sum[N] = {};
                                for (int r = 0; r < N; r++) in[r] = load(x + r * s.pixels + i);
                                for (int p = 0; p < N; p++) {
                                    const V from = load(dm + p * s.pixels + i);
                                    T *dbeta = query_beta + (c * N + p) * L, *dpsi = query_psi + (c * N + p) * N * L;
                                    store<T>(dbeta, load(dbeta) + from);
                                    for (int r = 0; r < N; r++) {
                                        store<T>(dpsi + r * L, load(dpsi + r * L) + from * in[r]);
                                        sum[r] += from * psi[p * N + r];
                                    }
                                }
                                for (int r = 0; r < N; r++) store<T>(dm + r * s.pixels + i, sum[r]);
                            }
                        }
                        s.crop(dq, outs.at(0, begin) + at, s.pixels);
                        s.crop(dkeys + s.origin, outs.at(1, begin) + at, s.padded);
                        if (value) s.crop(dvalues + s.origin, outs.at(2, begin) + at, s.padded);
                    }
                    query_parts.take(query_psi, query_beta, part, first, s.size);
                    key_parts.take(key_psi, key_beta, part, first, s.size);
                    if (value) value_parts.take(value_psi, value_beta, part, first, s.size);
                }
            outs.write(begin, end);
        }
    }
}

template <class T, class F> void with_order(const Sizes<T> &s, F function) {
    if (s.order == 1) function(std::integral_constant<int, 1>());
    if (s.order == 2) function(std::integral_constant<int, 2>());
    if (s.order == 4) function(std::integral_constant<int, 4>());
    if (s.order == 8) function(std::integral_constant<int, 8>());
}

} // namespace

// S: the type of the fields in memory, T: what they are computed in; last: whether their layout is (pixels, R, C).

extern "C" void affine_attention(Scalar *query, Scalar *key, Scalar *value, const Real *query_psi,
        const Real *query_beta, const Real *key_psi, const Real *key_beta, const Real *value_psi,
        const Real *value_beta, Scalar *out, int64_t batch, int64_t channels, int64_t order, int64_t height,
        int64_t width, int64_t k, int64_t heads, double scale, int64_t last, int64_t threads) {
    const Sizes<Real> s(batch, channels, order, height, width, k, heads);
    const Map<Real> queries(query_psi, query_beta, channels, order, 1);
    const Map<Real> keys(key_psi, key_beta, channels, order, k * k);
    const Map<Real> values(value_psi, value_beta, channels, order, k * k);
    with_order(s, [&](auto n) {
        forward<Real, decltype(n)::value>(s, query, key, value, queries, keys, values, scale, out, last, threads);
    });
}
extern "C" void affine_attention_backward(Scalar *grad, Scalar *query, Scalar *key, Scalar *value,
        const Real *query_psi, const Real *query_beta, const Real *key_psi, const Real *key_beta, const Real *value_psi,
        const Real *value_beta, Scalar *grad_query, Scalar *grad_key, Scalar *grad_value, Real *grad_query_psi,
        Real *grad_query_beta, Real *grad_key_psi, Real *grad_key_beta, Real *grad_value_psi, Real *grad_value_beta,
        int64_t batch, int64_t channels, int64_t order, int64_t height, int64_t width, int64_t k, int64_t heads,
        double scale, int64_t last, int64_t threads) {
    const Sizes<Real> s(batch, channels, order, height, width, k, heads);
    const Map<Real> queries(query_psi, query_beta, channels, order, 1);
    const Map<Real> keys(key_psi, key_beta, channels, order, k * k);
    const Map<Real> values(value_psi, value_beta, channels, order, k * k);
    const int64_t parts = std::max<int64_t>(1, std::min(batch, (4 * threads + heads - 1) / heads));
    Parts<Real> query_parts(parts, channels, order, 1), key_parts(parts, channels, order, k * k);
    Parts<Real> value_parts(parts, value ? channels : 0, order, k * k);
    with_order(s, [&](auto n) {
        backward<Real, decltype(n)::value>(
            s, grad, query, key, value, queries, keys, values, scale, grad_query, grad_key, grad_value,
            query_parts, key_parts, value_parts, parts, last, threads
        );
    });
    query_parts.sum(grad_query_psi, grad_query_beta);
    key_parts.sum(grad_key_psi, grad_key_beta);
    if (value) value_parts.sum(grad_value_psi, grad_value_beta);
}
