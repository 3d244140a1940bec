// Group convolutions through the irreps of the group, and the gradient of their filters.
//
// With taps renamed by the pose that reads them, d = R_g e, a k x k group convolution is k·k·C copies of one convolution
// over the group alone, out(h) = Σ_g κ(h⁻¹ g) v(g), which the Fourier transform over the group makes block diagonal:
// 6 products instead of 16 for four rotations, 12 instead of 64 with reflections, 2 instead of 4 for a group of two.
// Fields lie with channels last, (B, h, w, |H|, C), so that every transform is a few sums of whole vectors. A thread
// works on a tile of pixels: it gathers and transforms a part of the patches into a buffer that stays in its cache,
// multiplies it by the transformed filters (packed in panels, once a call), and transforms the sums back.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <utility>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "common.h"

namespace {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64;
constexpr int rows_of_two = 12, rows_of_one = 24;  // accumulators of 2 or 1 vectors that stay in 32 registers
#elif defined(__AVX__)
constexpr int vector_bytes = 32;
constexpr int rows_of_two = 6, rows_of_one = 12;
#elif defined(__aarch64__)
constexpr int vector_bytes = 16;
constexpr int rows_of_two = 12, rows_of_one = 24;
#else
constexpr int vector_bytes = 16;
constexpr int rows_of_two = 6, rows_of_one = 12;
#endif

constexpr int64_t tile = 96;         // pixels at a time, a multiple of all numbers of rows
constexpr int64_t depth = 240;       // the most rows of the filters at a time, a multiple of all numbers of rows
constexpr int64_t slack = 64;        // numbers behind each buffer that a vector may touch

template <typename T, int L>
struct VectorOf {
    typedef T type __attribute__((vector_size(sizeof(T) * L)));
};
template <typename T, int L>
using Vec = typename VectorOf<T, L>::type;
template <typename T>
constexpr int lanes = vector_bytes / sizeof(T);

struct bfloat16 {
    uint16_t bits;
};

// Loads and stores of L numbers; a bfloat16 is the upper half of a float, rounded to even.
template <typename T, int L>
inline Vec<T, L> load(const T *from) {
    Vec<T, L> value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <typename T, int L>
inline Vec<float, L> load(const bfloat16 *from) {
    Vec<uint16_t, L> half;
    std::memcpy(&half, from, sizeof half);
    Vec<uint32_t, L> bits = __builtin_convertvector(half, Vec<uint32_t, L>) << 16;
    Vec<float, L> value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
template <int L>
inline void store(float *to, Vec<float, L> value) {
    std::memcpy(to, &value, sizeof value);
}
template <int L>
inline void store(double *to, Vec<double, L> value) {
    std::memcpy(to, &value, sizeof value);
}
template <int L>
inline void store(uint16_t *to, Vec<uint16_t, L> value) {
    std::memcpy(to, &value, sizeof value);
}
template <int L>
inline void store(bfloat16 *to, Vec<float, L> value) {
    Vec<uint32_t, L> bits;
    std::memcpy(&bits, &value, sizeof bits);
    const Vec<uint32_t, L> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const Vec<uint32_t, L> nan = (Vec<uint32_t, L>)((bits & 0x7fffffff) > 0x7f800000);
    const Vec<uint16_t, L> half = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), Vec<uint16_t, L>);
    std::memcpy(to, &half, sizeof half);
}

inline float upcast(float x) { return x; }
inline double upcast(double x) { return x; }
inline float upcast(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline void downcast(float x, float *to) { *to = x; }
inline void downcast(double x, double *to) { *to = x; }
inline void downcast(float x, bfloat16 *to) { store<1>(to, Vec<float, 1>{x}); }

// Calls f.template operator()<L>(i) for blocks of L of n numbers, the last one overlapping the one before: f must assign.
template <int L, typename F>
inline void spans(int64_t n, F &&f) {
    if (n >= L) {
        int64_t i = 0;
        for (; i + L <= n; i += L) f(std::integral_constant<int, L>{}, i);
        if (i < n) f(std::integral_constant<int, L>{}, n - L);
        return;
    }
    if constexpr (L > 1) spans<L / 2>(n, f);
}

// The real Fourier transform over the group, in place, with coefficients 1, 0 and -1, and its transpose. Order 2: the
// even and the odd sum. Order 4, rotations: the trivial and the alternating sum, then cosine and sine. Order 8, rotations
// r and reflections m at 4m + r: the four sums with signs 1, (-1)^m, (-1)^r, (-1)^(m + r), then ρ00, ρ01, ρ10, ρ11 of
// ρ(r, m) = [[cos, -sin], [sin, cos]] diag(1, (-1)^m).
template <int ORDER, typename V>
inline void transform(V *v) {
    if constexpr (ORDER == 2) {
        const V a = v[0], b = v[1];
        v[0] = a + b, v[1] = a - b;
    } else if constexpr (ORDER == 4) {
        const V a = v[0] + v[2], b = v[1] + v[3], re = v[0] - v[2], im = v[1] - v[3];
        v[0] = a + b, v[1] = a - b, v[2] = re, v[3] = im;
    } else {
        transform<4>(v);
        transform<4>(v + 4);
        const V a = v[0], b = v[1], re = v[2], im = v[3], c = v[4], d = v[5], ue = v[6], ui = v[7];
        v[0] = a + c, v[1] = a - c, v[2] = b + d, v[3] = b - d;
        v[4] = re + ue, v[5] = ui - im, v[6] = im + ui, v[7] = re - ue;
    }
}
template <int ORDER, typename V>
inline void transposed(V *v) {
    if constexpr (ORDER == 2) {
        transform<2>(v);
    } else if constexpr (ORDER == 4) {
        const V a = v[0] + v[1], b = v[0] - v[1], re = v[2], im = v[3];
        v[0] = a + re, v[1] = b + im, v[2] = a - re, v[3] = b - im;
    } else {
        const V a = v[0], b = v[1], c = v[2], d = v[3], p = v[4], q = v[5], r = v[6], s = v[7];
        v[0] = a + b, v[1] = c + d, v[2] = p + s, v[3] = r - q;
        v[4] = a - b, v[5] = c - d, v[6] = p - s, v[7] = r + q;
        transposed<4>(v);
        transposed<4>(v + 4);
    }
}

// The irreps: `count` blocks; a block multiplies `parts` transforms, side by side along the rows of the filters, by
// filters of `parts` times as many columns, once for each of `copies` rows of the representation.
template <int ORDER>
struct Irreps {
    static constexpr int count = ORDER == 8 ? 5 : ORDER == 4 ? 3 : 2;
    static constexpr int parts(int block) { return ORDER > 2 && block == count - 1 ? 2 : 1; }
    static constexpr int copies(int block) { return ORDER == 8 && block == 4 ? 2 : 1; }
    // What the filters are multiplied by, so that the transposed transform undoes the transform.
    static constexpr double scale(int component) {
        return (component >= (ORDER == 2 ? 2 : ORDER / 2) ? 2.0 : 1.0) / ORDER;
    }
    // Where filters of each transform stand: in the part of the rows, the part of the columns, and with which sign.
    static constexpr int component(int block, int row, int column) {
        if (block < count - 1 || ORDER == 2) return block;
        return ORDER == 4 ? 2 + (row ^ column) : 4 + 2 * column + row;
    }
    static constexpr int sign(int block, int row, int column) {
        return ORDER == 4 && block == 2 && row == 0 && column == 1 ? -1 : 1;
    }
};

struct Shape {
    int64_t batch, in, out, height, width, out_height, out_width, side, stride, padding, dilation;
    const int64_t *reads;   // [|H|, k·k]: the tap that each pose reads for each renamed tap
    const int64_t *places;  // [k·k, |H|]: the entry of a filter (|H|·k·k) that stands there after the renaming

    int64_t taps() const { return side * side; }
    int64_t rows() const { return taps() * in; }
    int64_t pixels() const { return out_height * out_width; }
};

inline int64_t padded(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Memory on the boundaries of cache lines. It is 0 at first: what vectors read beside a block and nobody uses must not be
// so small that the processor slows down.
template <typename T>
class Buffer {
   public:
    explicit Buffer(int64_t size = 0) { reserve(size); }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { std::free(data_); }
    T *reserve(int64_t size) {
        if (size > size_) {
            std::free(data_);
            void *p = nullptr;
            if (posix_memalign(&p, 64, (size + slack) * sizeof(T))) std::abort();
            std::memset(p, 0, (size + slack) * sizeof(T));
            data_ = static_cast<T *>(p), size_ = size;
        }
        return data_;
    }
    T *data() const { return data_; }

   private:
    T *data_ = nullptr;
    int64_t size_ = 0;
};

// How filters are packed: of each block, panels of two vectors (the last one maybe of one) of columns; in a panel the
// parts of the rows one after the other.
template <typename T, int ORDER>
struct Panels {
    using I = Irreps<ORDER>;
    Panels(int64_t rows, int64_t out) : rows(padded(rows, rows_of_one)), out(out) {
        for (int b = 0; b < I::count; b++) {
            start[b] = size, size += this->rows * I::parts(b) * columns(b);
            sum[b] = sums, sums += tile * I::copies(b) * columns(b);
        }
    }
    int64_t columns(int block) const { return padded(I::parts(block) * out, lanes<T>); }
    // The first number of row 0 of a part, for a column.
    int64_t at(int block, int part, int64_t column) const {
        const int64_t first = column / (2 * lanes<T>) * (2 * lanes<T>), width = wide(block, first);
        return start[block] + I::parts(block) * rows * first + part * rows * width + column - first;
    }
    int64_t wide(int block, int64_t column) const { return std::min<int64_t>(2 * lanes<T>, columns(block) - column); }
    // The sums of a tile, (copies, pixels, columns) for each block: where a component's stand.
    int64_t sum_of(int component, int64_t *step) const {
        const int block = std::min(component, I::count - 1), left = component - block;
        *step = columns(block);
        const int parts = I::parts(block);
        return sum[block] + left / parts * tile * *step + left % parts * out;
    }

    const int64_t rows, out;
    int64_t start[I::count], sum[I::count], size = 0, sums = 0;
};

// c (MR, NV vectors) += Σ over parts and rows a (MR, rows) b (rows, NV vectors).
template <typename T, int LEADING, int MR, int NV>
void multiply(const T *a, int64_t a_part, const T *b, int64_t b_part, int parts, int64_t rows, T *c, int64_t step,
              bool first) {
    constexpr int L = lanes<T>;
    using V = Vec<T, L>;
    V acc[MR][NV];
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) acc[i][j] = first ? V{} : load<T, L>(c + i * step + j * L);
    for (int part = 0; part < parts; part++) {
        const T *pa = a + part * a_part, *pb = b + part * b_part;
        for (int64_t k = 0; k < rows; k++, pa++, pb += NV * L) {
            V right[NV];
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) right[j] = load<T, L>(pb + j * L);
#pragma GCC unroll 32
            for (int i = 0; i < MR; i++) {
                const V left = V{} + pa[i * LEADING];
#pragma GCC unroll 2
                for (int j = 0; j < NV; j++) acc[i][j] += left * right[j];
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) store<L>(c + i * step + j * L, acc[i][j]);
}

// c (MR, NV vectors) += Σ over pixels aᵀ (pixels, MR) b (pixels, NV vectors), for each of the copies.
template <typename T, int LEADING, int MR, int NV>
void multiply_transposed(const T *a, int64_t a_copy, const T *b, int64_t b_copy, int copies, int64_t step,
                         int64_t pixels, T *c) {
    constexpr int L = lanes<T>;
    using V = Vec<T, L>;
    V acc[MR][NV];
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) acc[i][j] = load<T, L>(c + (i * NV + j) * L);
    for (int copy = 0; copy < copies; copy++) {
        const T *pa = a + copy * a_copy, *pb = b + copy * b_copy;
        for (int64_t p = 0; p < pixels; p++, pa += LEADING, pb += step) {
            V right[NV];
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) right[j] = load<T, L>(pb + j * L);
#pragma GCC unroll 32
            for (int i = 0; i < MR; i++) {
                const V left = V{} + pa[i];
#pragma GCC unroll 2
                for (int j = 0; j < NV; j++) acc[i][j] += left * right[j];
            }
        }
    }
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) store<L>(c + (i * NV + j) * L, acc[i][j]);
}

// One step of transposing L vectors of L numbers: exchanges the D off the diagonal in each square of 2D.
template <int D, typename V, size_t... I>
inline void exchange(V &a, V &b, std::index_sequence<I...>) {
    constexpr size_t n = sizeof...(I);
    const V low = __builtin_shufflevector(a, b, (I & D ? I - D + n : I)...);
    b = __builtin_shufflevector(a, b, (I & D ? I + n : I + D)...);
    a = low;
}
template <int D, typename V, int L>
inline void exchange(V (&rows)[L]) {
#pragma GCC unroll 16
    for (int l = 0; l < L; l++)
        if (!(l & D)) exchange<D>(rows[l], rows[l + D], std::make_index_sequence<L>());
}

// Calls f(i) for blocks of L of n numbers, n >= L, the last one overlapping the one before.
template <int L, typename F>
inline void blocks(int64_t n, F &&f) {
    for (int64_t i = 0; i + L < n; i += L) f(i);
    f(n - L);
}

// Transposes a (rows, columns) matrix: to[j·to_step + i] = from[i·from_step + j]; in blocks of L, the largest that fit.
template <typename T, int L = std::min(lanes<T>, 16)>
void transpose(const T *from, int64_t from_step, int64_t rows, int64_t columns, T *to, int64_t to_step) {
    if constexpr (L > 1) {
        if (rows < L || columns < L) return transpose<T, L / 2>(from, from_step, rows, columns, to, to_step);
        using V = Vec<T, L>;
        const auto block = [&](int64_t i, int64_t j) {
            V r[L];
#pragma GCC unroll 16
            for (int l = 0; l < L; l++) r[l] = load<T, L>(from + (i + l) * from_step + j);
            exchange<1>(r);
            if constexpr (L > 2) exchange<2>(r);
            if constexpr (L > 4) exchange<4>(r);
            if constexpr (L > 8) exchange<8>(r);
#pragma GCC unroll 16
            for (int l = 0; l < L; l++) store<L>(to + (j + l) * to_step + i, r[l]);
        };
        // Along whichever is far apart in memory, so that what is read or written of it follows on.
        if (from_step > to_step)
            blocks<L>(rows, [&](int64_t i) { blocks<L>(columns, [&](int64_t j) { block(i, j); }); });
        else
            blocks<L>(columns, [&](int64_t j) { blocks<L>(rows, [&](int64_t i) { block(i, j); }); });
    } else {
        for (int64_t i = 0; i < rows; i++)
            for (int64_t j = 0; j < columns; j++) to[j * to_step + i] = from[i * from_step + j];
    }
}

// L filters, `step` apart, of so many entries: to[q·L + l] is entry q of filter l, 0 from the filter `count` on.
template <typename S, typename T>
void interleave(const S *filters, int64_t step, int64_t count, int64_t entries, T *to) {
    constexpr int L = lanes<T>;
    if constexpr (std::is_same_v<S, T>) {
        if (count == L) return transpose<T>(filters, step, L, entries, to, L);
    }
    for (int64_t l = 0; l < L; l++)
        for (int64_t q = 0; q < entries; q++) to[q * L + l] = l < count ? upcast(filters[l * step + q]) : T(0);
}

// The inverse of `interleave`.
template <typename S, typename T>
void separate(const T *from, int64_t step, int64_t count, int64_t entries, S *filters) {
    constexpr int L = lanes<T>;
    if constexpr (std::is_same_v<S, T>) {
        if (count == L) return transpose<T>(from, L, entries, L, filters, step);
    }
    for (int64_t l = 0; l < count; l++)
        for (int64_t q = 0; q < entries; q++) downcast(from[q * L + l], filters + l * step + q);
}

// Transforms filters and packs them. Those of the gradient of the input are stored the other way round, (in, out).
template <typename S, typename T, int ORDER>
void pack(const S *filters, const Shape &s, bool swapped, const Panels<T, ORDER> &panels, T *packed, int threads) {
    using I = Irreps<ORDER>;
    constexpr int L = lanes<T>;
    using V = Vec<T, L>;
    const int64_t entries = ORDER * s.taps(), blocks = (s.out + L - 1) / L;
    const int64_t out_step = swapped ? entries : s.in * entries, in_step = swapped ? s.out * entries : entries;
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Buffer<T> rotated(entries * L);
#pragma omp for schedule(static) collapse(2)
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t c = 0; c < s.in; c++) {
                const int64_t n0 = block * L, count = std::min<int64_t>(L, s.out - n0);
                const S *from = filters + n0 * out_step + c * in_step;
                interleave<S, T>(from, out_step, count, entries, rotated.data());
                for (int64_t e = 0; e < s.taps(); e++) {
                    V v[ORDER];
                    for (int j = 0; j < ORDER; j++) v[j] = load<T, L>(rotated.data() + s.places[e * ORDER + j] * L);
                    transform<ORDER>(v);
                    for (int j = 0; j < ORDER; j++) v[j] *= T(I::scale(j));
                    const int64_t row = e * s.in + c;
                    for (int b = 0; b < I::count; b++)
                        for (int i = 0; i < I::parts(b); i++)
                            for (int j = 0; j < I::parts(b); j++) {
                                const V value = v[I::component(b, i, j)] * T(I::sign(b, i, j));
                                const int64_t first = j * s.out + n0;
                                if (count == L && first % L == 0) {
                                    store<L>(packed + panels.at(b, i, first) +
                                                 row * panels.wide(b, first / (2 * L) * (2 * L)),
                                             value);
                                    continue;
                                }
                                for (int64_t l = 0; l < count; l++) {
                                    const int64_t n = first + l, width = panels.wide(b, n / (2 * L) * (2 * L));
                                    packed[panels.at(b, i, n) + row * width] = value[l];
                                }
                            }
                }
            }
    }
}

// The inverse of `pack` for gradients: out of all threads' sums into filters.
template <typename S, typename T, int ORDER>
void unpack(const T *packed, const Shape &s, const Panels<T, ORDER> &panels, S *filters, int threads) {
    using I = Irreps<ORDER>;
    constexpr int L = lanes<T>;
    using V = Vec<T, L>;
    const int64_t entries = ORDER * s.taps(), blocks = (s.out + L - 1) / L;
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Buffer<T> rotated(entries * L);
#pragma omp for schedule(static) collapse(2)
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t c = 0; c < s.in; c++) {
                const int64_t n0 = block * L, count = std::min<int64_t>(L, s.out - n0);
                for (int64_t e = 0; e < s.taps(); e++) {
                    const int64_t row = e * s.in + c;
                    V v[ORDER];
                    for (int j = 0; j < ORDER; j++) v[j] = V{};
                    for (int b = 0; b < I::count; b++)
                        for (int i = 0; i < I::parts(b); i++)
                            for (int j = 0; j < I::parts(b); j++) {
                                V value{};
                                const int64_t first = j * s.out + n0;
                                if (count == L && first % L == 0) {
                                    value = load<T, L>(packed + panels.at(b, i, first) +
                                                       row * panels.wide(b, first / (2 * L) * (2 * L)));
                                } else {
                                    for (int64_t l = 0; l < count; l++) {
                                        const int64_t n = first + l, width = panels.wide(b, n / (2 * L) * (2 * L));
                                        value[l] = packed[panels.at(b, i, n) + row * width];
                                    }
                                }
                                v[I::component(b, i, j)] += value * T(I::sign(b, i, j));
                            }
                    for (int j = 0; j < ORDER; j++) v[j] *= T(I::scale(j));
                    transposed<ORDER>(v);
                    for (int j = 0; j < ORDER; j++) store<L>(rotated.data() + s.places[e * ORDER + j] * L, v[j]);
                }
                separate<S, T>(rotated.data(), s.in * entries, count, entries, filters + (n0 * s.in + c) * entries);
            }
    }
}

// Where the taps of a tile's pixels are in a field; `zeros` outside of it.
template <typename S, int ORDER>
void locate(const S *field, const S *zeros, const Shape &s, int64_t first, int64_t count, const S **places) {
    const int64_t unit = ORDER * s.in, taps = s.taps();
    int64_t b = first / s.pixels(), y = first % s.pixels() / s.out_width, x = first % s.out_width;
    for (int64_t p = 0; p < count; p++, places += taps) {
        const int64_t top = y * s.stride - s.padding, left = x * s.stride - s.padding;
        const S *corner = field + ((b * s.height + top) * s.width + left) * unit;
        const int64_t reach = (s.side - 1) * s.dilation;
        const S **place = places;
        if (top >= 0 && left >= 0 && top + reach < s.height && left + reach < s.width) {
            for (int64_t i = 0; i < s.side; i++)
                for (int64_t j = 0; j < s.side; j++)
                    *place++ = corner + (i * s.width + j) * s.dilation * unit;
        } else {
            for (int64_t i = 0, row = top; i < s.side; i++, row += s.dilation)
                for (int64_t j = 0, column = left; j < s.side; j++, column += s.dilation) {
                    const bool inside = row >= 0 && row < s.height && column >= 0 && column < s.width;
                    *place++ = inside ? corner + (i * s.width + j) * s.dilation * unit : zeros;
                }
        }
        if (++x == s.out_width) {
            x = 0;
            if (++y == s.out_height) y = 0, b++;
        }
    }
}

// Gathers and transforms the rows first .. last of the patches of a tile: (|H|, pixels, LEADING).
template <typename S, typename T, int ORDER, int LEADING>
void gather(const S *const *places, const Shape &s, int64_t count, int64_t first, int64_t last, T *patches) {
    constexpr int64_t component = tile * LEADING;
    constexpr int L = lanes<T>;
    const int64_t taps = s.taps();
    for (int64_t row = first; row < last;) {
        const int64_t e = row / s.in, c = row % s.in, n = std::min(s.in - c, last - row);
        int64_t reads[ORDER];
        for (int g = 0; g < ORDER; g++) reads[g] = s.reads[g * taps + e];
        T *to = patches + row - first;
        for (int64_t p = 0; p < count; p++, to += LEADING) {
            const S *from[ORDER];
            for (int g = 0; g < ORDER; g++) from[g] = places[p * taps + reads[g]] + g * s.in + c;
            spans<L>(n, [&](auto size, int64_t i) {
                constexpr int N = decltype(size)::value;
                Vec<T, N> v[ORDER];
                for (int g = 0; g < ORDER; g++) v[g] = load<T, N>(from[g] + i);
                transform<ORDER>(v);
                for (int g = 0; g < ORDER; g++) store<N>(to + g * component + i, v[g]);
            });
        }
        row += n;
    }
}

// How many rows at a time, so that all parts are about as large.
inline int64_t chunk(int64_t rows) {
    const int64_t count = (rows + depth - 1) / depth;
    return std::min(depth, padded((rows + count - 1) / count, rows_of_one));
}

// How many pixels at a time: few where there are few rows, which then stay in the first cache.
inline int64_t tile_of(const Shape &s) { return s.rows() <= 112 ? tile / 2 : tile; }

// Calls f with the numbers from a pixel of the patches to the next: fewer for few rows, so that they lie close together.
// Odd numbers of cache lines, or pixels would share places in the cache. Compiled twice for single precision alone.
template <typename S, typename F>
void by_leading(int64_t rows, F &&f) {
    if constexpr (std::is_same_v<S, float>) {
        if (rows <= 96) return f(std::integral_constant<int, 112>{});
    }
    f(std::integral_constant<int, 272>{});
}

// What a thread keeps from call to call: memory that is new costs more than what is done with it.
template <typename S, typename T>
struct Scratch {
    Buffer<T> patches, sums, packed;
    Buffer<S> fields, outs, zeros;
    Buffer<const S *> places;
};
template <typename S, typename T>
Scratch<S, T> &scratch() {
    static thread_local Scratch<S, T> kept;
    return kept;
}

// Room in a buffer that is kept, unless so much is asked for that it has to be given back.
constexpr int64_t most_kept = int64_t(4) << 20;
template <typename T>
T *room(Buffer<T> &kept, Buffer<T> &given_back, int64_t size) {
    return (size * int64_t(sizeof(T)) <= most_kept ? kept : given_back).reserve(size);
}
template <typename S>
const S *zeroed(Buffer<S> &kept, int64_t size) {
    S *zeros = kept.reserve(size);
    std::memset(zeros, 0, size * sizeof(S));
    return zeros;
}

// Fields with channels last to fields with channels last.
template <typename S, typename T, int ORDER, int LEADING>
void correlate(const S *field, const T *packed, const S *bias, const S *zeros, const Shape &s,
               const Panels<T, ORDER> &panels, S *out, int threads) {
    using I = Irreps<ORDER>;
    constexpr int L = lanes<T>;
    constexpr int64_t component = tile * LEADING;
    const int64_t total = s.batch * s.pixels();
    // Tiles of equal size, in whole rows of accumulators.
    const int64_t most = tile_of(s), tiles = (total + most - 1) / most;
    const int64_t size = std::min(most, padded((total + tiles - 1) / tiles, rows_of_two));
    const int64_t count = (total + size - 1) / size, step = chunk(s.rows());
#pragma omp parallel num_threads(threads) if (count > 1)
    {
        const FlushSubnormals flush;
        Scratch<S, T> &kept = scratch<S, T>();
        T *patches = kept.patches.reserve(ORDER * component + LEADING * rows_of_one);
        T *sums = kept.sums.reserve(panels.sums + rows_of_one * panels.columns(I::count - 1));
        const S **places = kept.places.reserve(tile * s.taps());
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++) {
            const int64_t begin = t * size, pixels = std::min(size, total - begin);
            locate<S, ORDER>(field, zeros, s, begin, pixels, places);
            for (int64_t row = 0; row < s.rows(); row += step) {
                const int64_t rows = std::min(step, s.rows() - row);
                gather<S, T, ORDER, LEADING>(places, s, pixels, row, row + rows, patches);
                for (int b = 0; b < I::count; b++)
                    for (int64_t n = 0; n < panels.columns(b); n += 2 * L) {
                        const int parts = I::parts(b);
                        const int64_t width = panels.wide(b, n);
                        const T *right = packed + panels.at(b, 0, n) + row * width;
                        for (int copy = 0; copy < I::copies(b); copy++) {
                            const T *left = patches + (b + copy * parts) * component;
                            T *to = sums + panels.sum[b] + copy * tile * panels.columns(b) + n;
                            const int64_t wide = panels.columns(b);
                            if (width == 2 * L)
                                for (int64_t p = 0; p < pixels; p += rows_of_two)
                                    multiply<T, LEADING, rows_of_two, 2>(left + p * LEADING, component, right,
                                                                panels.rows * width, parts, rows, to + p * wide, wide,
                                                                row == 0);
                            else
                                for (int64_t p = 0; p < pixels; p += rows_of_one)
                                    multiply<T, LEADING, rows_of_one, 1>(left + p * LEADING, component, right,
                                                                panels.rows * width, parts, rows, to + p * wide, wide,
                                                                row == 0);
                        }
                    }
            }
            const T *from[ORDER];
            int64_t steps[ORDER];
            for (int j = 0; j < ORDER; j++) from[j] = sums + panels.sum_of(j, steps + j);
            for (int64_t p = 0; p < pixels; p++) {
                S *to = out + (begin + p) * ORDER * s.out;
                spans<L>(s.out, [&](auto size, int64_t i) {
                    constexpr int N = decltype(size)::value;
                    Vec<T, N> v[ORDER];
                    for (int j = 0; j < ORDER; j++) v[j] = load<T, N>(from[j] + p * steps[j] + i);
                    if (bias) v[0] += load<T, N>(bias + i);
                    transposed<ORDER>(v);
                    for (int g = 0; g < ORDER; g++) store<N>(to + g * s.out + i, v[g]);
                });
            }
        }
    }
}

// Adds what fields and gradients with channels last give to the transformed filters' gradients, `sums` of each thread.
template <typename S, typename T, int ORDER, int LEADING>
void correlate_filters(const S *field, const S *grad, const S *zeros, const Shape &s, const Panels<T, ORDER> &panels,
                       T *sums, int threads) {
    using I = Irreps<ORDER>;
    constexpr int L = lanes<T>;
    constexpr int64_t component = tile * LEADING;
    const int64_t most = tile_of(s);
    const int64_t total = s.batch * s.pixels(), count = (total + most - 1) / most, step = chunk(s.rows());
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Scratch<S, T> &kept = scratch<S, T>();
        T *patches = kept.patches.reserve(ORDER * component + LEADING * rows_of_one);
        T *grads = kept.sums.reserve(panels.sums + rows_of_one * panels.columns(I::count - 1));
        const S **places = kept.places.reserve(tile * s.taps());
        T *to[ORDER];
        int64_t steps[ORDER];
        for (int j = 0; j < ORDER; j++) to[j] = grads + panels.sum_of(j, steps + j);
#ifdef _OPENMP
        T *own = sums + omp_get_thread_num() * panels.size;
#else
        T *own = sums;
#endif
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++) {
            const int64_t begin = t * most, pixels = std::min(most, total - begin);
            for (int64_t p = 0; p < pixels; p++) {
                const S *from = grad + (begin + p) * ORDER * s.out;
                spans<L>(s.out, [&](auto size, int64_t i) {
                    constexpr int N = decltype(size)::value;
                    Vec<T, N> v[ORDER];
                    for (int g = 0; g < ORDER; g++) v[g] = load<T, N>(from + g * s.out + i);
                    transform<ORDER>(v);
                    for (int j = 0; j < ORDER; j++) store<N>(to[j] + p * steps[j] + i, v[j]);
                });
            }
            locate<S, ORDER>(field, zeros, s, begin, pixels, places);
            for (int64_t row = 0; row < s.rows(); row += step) {
                const int64_t rows = std::min(step, s.rows() - row);
                gather<S, T, ORDER, LEADING>(places, s, pixels, row, row + rows, patches);
                for (int b = 0; b < I::count; b++)
                    for (int64_t n = 0; n < panels.columns(b); n += 2 * L)
                        for (int part = 0; part < I::parts(b); part++) {
                            const int64_t width = panels.wide(b, n), wide = panels.columns(b);
                            T *into = own + panels.at(b, part, n) + row * width;
                            const T *left = patches + (b + part) * component;
                            const T *right = grads + panels.sum[b] + n;
                            const int64_t next = I::parts(b) * component;
                            if (width == 2 * L)
                                for (int64_t k = 0; k < rows; k += rows_of_two)
                                    multiply_transposed<T, LEADING, rows_of_two, 2>(left + k, next, right, tile * wide,
                                                                           I::copies(b), wide, pixels,
                                                                           into + k * width);
                            else
                                for (int64_t k = 0; k < rows; k += rows_of_one)
                                    multiply_transposed<T, LEADING, rows_of_one, 1>(left + k, next, right, tile * wide,
                                                                           I::copies(b), wide, pixels,
                                                                           into + k * width);
                        }
            }
        }
    }
}

// A part of a batch of contiguous fields (C, |H|, pixels): some images, of each the same run of pixels.
struct Part {
    int64_t image, images, pixel, pixels;
};

// Calls f(part) for parts of a batch that stay in a cache as channels last, field and output; the pixels are those of the
// output. 1 x 1 filters take large images apart.
template <typename F>
inline void by_parts(const Shape &s, int64_t order, int64_t bytes, int threads, F &&f) {
    const bool pointwise = s.side == 1 && s.stride == 1 && s.padding == 0;
    const int64_t held = int64_t(pointwise ? 768 : 2048) * 1024 * threads, least = 4 * tile * threads;
    const int64_t image = order * bytes * (s.in * s.height * s.width + s.out * s.pixels());
    if (pointwise && image > held && s.pixels() > least) {
        const int64_t pixels = padded(std::max(least, held / (order * bytes * (s.in + s.out))), tile);
        for (int64_t b = 0; b < s.batch; b++)
            for (int64_t p = 0; p < s.pixels(); p += pixels) f(Part{b, 1, p, std::min(pixels, s.pixels() - p)});
        return;
    }
    const int64_t needed = (least + s.pixels() - 1) / s.pixels();
    const int64_t images = std::clamp<int64_t>(held / std::max<int64_t>(1, image), std::min(needed, s.batch), s.batch);
    for (int64_t b = 0; b < s.batch; b += images) f(Part{b, std::min(images, s.batch - b), 0, s.pixels()});
}

// The shape of a part.
inline Shape of_part(const Shape &s, const Part &part) {
    Shape found = s;
    found.batch = part.images;
    if (part.pixels < s.pixels()) found.height = found.out_height = 1, found.width = found.out_width = part.pixels;
    return found;
}

// A part of contiguous fields (C, |H|, `total` pixels) to or from channels last (pixels, |H|, C).
template <typename S, int ORDER>
void relay(const S *from, S *to, const Part &part, int64_t channels, int64_t total, bool last, int threads) {
    using U = std::conditional_t<sizeof(S) == 8, double, std::conditional_t<sizeof(S) == 4, float, uint16_t>>;
    const U *f = reinterpret_cast<const U *>(from);
    U *t = reinterpret_cast<U *>(to);
#pragma omp parallel for num_threads(threads) collapse(2) schedule(static)
    for (int64_t b = 0; b < part.images; b++)
        for (int64_t g = 0; g < ORDER; g++) {
            const int64_t planes = ((part.image + b) * ORDER * channels + g) * total + part.pixel;
            const int64_t pixels = (b * part.pixels * ORDER + g) * channels;
            if (last)
                transpose<U>(f + planes, ORDER * total, channels, part.pixels, t + pixels, ORDER * channels);
            else
                transpose<U>(f + pixels, ORDER * channels, part.pixels, channels, t + planes, ORDER * total);
        }
}

// Contiguous fields part by part with channels last: calls f(shape, field, other) of each. The other is the output,
// filled by f and written back, or a gradient, which f reads.
template <typename S, typename T, int ORDER, typename O, typename F>
void in_parts(const S *field, O *other, const Shape &s, int threads, F &&f) {
    constexpr bool reads = std::is_const_v<O>;
    int64_t most_in = 0, most_out = 0;
    by_parts(s, ORDER, sizeof(S), threads, [&](const Part &part) {
        const Shape one = of_part(s, part);
        most_in = std::max(most_in, one.batch * one.height * one.width);
        most_out = std::max(most_out, one.batch * one.pixels());
    });
    Scratch<S, T> &kept = scratch<S, T>();
    Buffer<S> more_fields, more_others;
    S *fields = room(kept.fields, more_fields, most_in * ORDER * s.in);
    S *others = room(kept.outs, more_others, most_out * ORDER * s.out);
    by_parts(s, ORDER, sizeof(S), threads, [&](const Part &part) {
        const Shape one = of_part(s, part);
        const Part read{part.image, part.images, part.pixel, one.height * one.width};
        relay<S, ORDER>(field, fields, read, s.in, s.height * s.width, true, threads);
        if constexpr (reads) relay<S, ORDER>(other, others, part, s.out, s.pixels(), true, threads);
        f(one, fields, others);
        if constexpr (!reads) relay<S, ORDER>(others, other, part, s.out, s.pixels(), false, threads);
    });
}

template <typename S, typename T, int ORDER>
void run(const S *field, const S *filters, const S *bias, S *out, const Shape &s, bool last, bool swapped, int threads) {
    const Panels<T, ORDER> panels(s.rows(), s.out);
    Scratch<S, T> &kept = scratch<S, T>();
    Buffer<T> more_packed;
    T *packed = room(kept.packed, more_packed, panels.size);
    const S *zeros = zeroed(kept.zeros, ORDER * s.in);
    pack<S, T, ORDER>(filters, s, swapped, panels, packed, threads);
    const auto correlated = [&](const Shape &one, const S *x, S *y) {
        by_leading<S>(s.rows(), [&](auto leading) {
            correlate<S, T, ORDER, decltype(leading)::value>(x, packed, bias, zeros, one, panels, y, threads);
        });
    };
    if (last) return correlated(s, field, out);
    in_parts<S, T, ORDER>(field, out, s, threads, correlated);
}

template <typename S, typename T, int ORDER>
void run_filters(const S *field, const S *grad, S *filters, const Shape &s, bool last, int threads) {
    const Panels<T, ORDER> panels(s.rows(), s.out);
    Scratch<S, T> &kept = scratch<S, T>();
    Buffer<T> more_sums;
    T *sums = room(kept.packed, more_sums, threads * panels.size);
    std::memset(sums, 0, threads * panels.size * sizeof(T));
    const S *zeros = zeroed(kept.zeros, ORDER * s.in);
    const auto add = [&](const Shape &one, const S *x, const S *dy) {
        by_leading<S>(s.rows(), [&](auto leading) {
            correlate_filters<S, T, ORDER, decltype(leading)::value>(x, dy, zeros, one, panels, sums, threads);
        });
    };
    if (last) {
        add(s, field, grad);
    } else {
        in_parts<S, T, ORDER>(field, grad, s, threads, add);
    }
    for (int64_t thread = 1; thread < threads; thread++)
        for (int64_t i = 0; i < panels.size; i++) sums[i] += sums[thread * panels.size + i];
    unpack<S, T, ORDER>(sums, s, panels, filters, threads);
}

template <typename F>
void by_order(int64_t order, F f) {
    if (order == 2) f(std::integral_constant<int, 2>{});
    if (order == 4) f(std::integral_constant<int, 4>{});
    if (order == 8) f(std::integral_constant<int, 8>{});
}

}  // namespace

#define DEFINE(name, S, T)                                                                                          \
    extern "C" void group_conv2d_##name(const S *field, const S *filters, const S *bias, S *out,                    \
                                        const int64_t *reads, const int64_t *places, int64_t order, int64_t batch,  \
                                        int64_t in, int64_t outs, int64_t height, int64_t width, int64_t out_height, \
                                        int64_t out_width, int64_t side, int64_t stride, int64_t padding,           \
                                        int64_t dilation, int64_t last, int64_t swapped, int64_t threads) {         \
        const Shape s{batch, in, outs, height, width, out_height, out_width, side, stride, padding, dilation,       \
                      reads, places};                                                                               \
        by_order(order, [&](auto n) {                                                                               \
            run<S, T, decltype(n)::value>(field, filters, bias, out, s, last, swapped, int(threads));               \
        });                                                                                                         \
    }                                                                                                               \
    extern "C" void group_conv2d_filters_##name(const S *field, const S *grad, S *filters, const int64_t *reads,    \
                                                const int64_t *places, int64_t order, int64_t batch, int64_t in,    \
                                                int64_t outs, int64_t height, int64_t width, int64_t out_height,    \
                                                int64_t out_width, int64_t side, int64_t stride, int64_t padding,   \
                                                int64_t dilation, int64_t last, int64_t threads) {                  \
        const Shape s{batch, in, outs, height, width, out_height, out_width, side, stride, padding, dilation,       \
                      reads, places};                                                                               \
        by_order(order, [&](auto n) {                                                                               \
            run_filters<S, T, decltype(n)::value>(field, grad, filters, s, last, int(threads));                     \
        });                                                                                                         \
    }

DEFINE(float, float, float)
DEFINE(double, double, double)
DEFINE(bfloat16, bfloat16, float)
