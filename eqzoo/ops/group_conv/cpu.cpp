// Group convolutions through the irreps of the group, and the gradient of their filters.
//
// With taps renamed by the pose that reads them, d = R_g e, a k x k group convolution is k·k·C copies of one convolution
// over the group alone, out(h) = Σ_g κ(h⁻¹ g) v(g), which the Fourier transform over the group makes block diagonal:
// 6 products instead of 16 for four rotations (5 with the complex one in three), 12 instead of 64 with reflections, 2
// instead of 4 for a group of two. Fields lie with channels last, (B, h, w, |H|, C), so that every transform is a few
// sums of whole vectors. A thread works on a tile of pixels: it gathers and transforms a part of the patches into a
// buffer that stays in its cache, multiplies it by the transformed filters (packed in panels, once a call), and
// transforms the sums back. Products are computed in float32 and float64 here, and in bfloat16.h in
// bfloat16.
#include "irreps.h"
#include "bfloat16.h"

namespace {

// How filters are packed: of each block, panels of two vectors (the last one maybe of one) of columns; in a panel the
// parts of the rows one after the other.
template <typename T, typename I>
struct Panels {
    Panels(int64_t rows, int64_t out) : rows(padded(rows, rows_of_one)), out(out) {
        for (int b = 0; b < I::count; b++) {
            start[b] = size, size += this->rows * I::parts(b) * columns(b);
            sum[b] = sums, sums += tile * I::copies(b) * columns(b);
            products += I::parts(b) * I::copies(b) * ((columns(b) + 2 * lanes<T> - 1) / (2 * lanes<T>));
        }
    }
    int64_t columns(int block) const { return padded(I::parts(block) * out, lanes<T>); }
    // The first number of row 0 of a part, for a column.
    int64_t at(int block, int part, int64_t column) const {
        const int64_t first = column / (2 * lanes<T>) * (2 * lanes<T>), width = wide(block, first);
        return start[block] + I::parts(block) * rows * first + part * rows * width + column - first;
    }
    // The rows of the panel that is multiplied after this one: its part of that number, if it has one.
    const T *after(const T *packed, int block, int64_t column, int part, int64_t row, int64_t count) const {
        column += 2 * lanes<T>;
        if (column >= columns(block)) column = 0, block++;
        if (block == I::count) block = 0, row = row + count < rows ? row + count : 0;
        return packed + at(block, std::min(part, I::parts(block) - 1), column) + row * wide(block, column);
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
    int64_t products = 0;  // of panels and parts, all copies
};

// c (MR, NV vectors) += Σ over parts and rows a (MR, rows) b (rows, NV vectors).
template <typename T, int LEADING, int MR, int NV>
void multiply(const T *a, int64_t a_part, const T *b, int64_t b_part, int parts, int64_t rows, T *c, int64_t step,
              bool first, Run ahead) {
    constexpr int L = lanes<T>;
    using V = Vector<T, L>;
    V acc[MR][NV];
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) acc[i][j] = first ? V{} : load<L>(c + i * step + j * L);
    for (int part = 0; part < parts; part++) {
        const T *pa = a + part * a_part, *pb = b + part * b_part;
        for (int64_t k = 0; k < rows; k++, pa++, pb += NV * L, ahead.from += ahead.bytes) {
            __builtin_prefetch(ahead.from);
            V right[NV];
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) right[j] = load<L>(pb + j * L);
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
                         int64_t pixels, T *c, Run ahead) {
    constexpr int L = lanes<T>;
    using V = Vector<T, L>;
    V acc[MR][NV];
#pragma GCC unroll 32
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 2
        for (int j = 0; j < NV; j++) acc[i][j] = load<L>(c + (i * NV + j) * L);
    for (int copy = 0; copy < copies; copy++) {
        const T *pa = a + copy * a_copy, *pb = b + copy * b_copy;
        const T *following = c + MR * NV * L;  // the sums of the next product
        for (int64_t p = 0; p < pixels; p++, pa += LEADING, pb += step, ahead.from += ahead.bytes) {
            __builtin_prefetch(ahead.from);
            __builtin_prefetch(following + p * (16 / int64_t(sizeof(T))));
            V right[NV];
#pragma GCC unroll 2
            for (int j = 0; j < NV; j++) right[j] = load<L>(pb + j * L);
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

// Transforms filters and packs them. Those of the gradient of the input are stored the other way round, (in, out).
template <typename S, typename T, typename I>
void pack(const S *filters, const Shape &s, bool swapped, const Panels<T, I> &panels, T *packed, int threads) {
    constexpr int L = lanes<T>;
    using V = Vector<T, L>;
    const int64_t entries = I::order * s.taps(), blocks = (s.out + L - 1) / L;
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
                    V v[I::components];
                    for (int j = 0; j < I::order; j++)
                        v[j] = load<L>(rotated.data() + s.places[e * I::order + j] * L);
                    I::filters(v);
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
template <typename S, typename T, typename I>
void unpack(const T *packed, const Shape &s, const Panels<T, I> &panels, S *filters, int threads) {
    constexpr int L = lanes<T>;
    using V = Vector<T, L>;
    const int64_t entries = I::order * s.taps(), blocks = (s.out + L - 1) / L;
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
                    V v[I::components];
                    for (int j = 0; j < I::components; j++) v[j] = V{};
                    for (int b = 0; b < I::count; b++)
                        for (int i = 0; i < I::parts(b); i++)
                            for (int j = 0; j < I::parts(b); j++) {
                                V value{};
                                const int64_t first = j * s.out + n0;
                                if (count == L && first % L == 0) {
                                    value = load<L>(packed + panels.at(b, i, first) +
                                                       row * panels.wide(b, first / (2 * L) * (2 * L)));
                                } else {
                                    for (int64_t l = 0; l < count; l++) {
                                        const int64_t n = first + l, width = panels.wide(b, n / (2 * L) * (2 * L));
                                        value[l] = packed[panels.at(b, i, n) + row * width];
                                    }
                                }
                                v[I::component(b, i, j)] += value * T(I::sign(b, i, j));
                            }
                    I::filter_gradients(v);
                    for (int j = 0; j < I::order; j++)
                        store<L>(rotated.data() + s.places[e * I::order + j] * L, v[j]);
                }
                separate<S, T>(rotated.data(), s.in * entries, count, entries, filters + (n0 * s.in + c) * entries);
            }
    }
}

// From a component of a tile to the next: not a multiple of half a page, or they would share places in the cache.
template <int LEADING>
constexpr int64_t component_of = tile * LEADING + 80;

// Gathers and transforms the rows first .. last of the patches of a tile: (|H|, pixels, LEADING).
template <typename S, typename T, typename I, int LEADING>
void gather(const S *const *places, const Shape &s, int64_t count, int64_t first, int64_t last, T *patches) {
    constexpr int64_t component = component_of<LEADING>;
    constexpr int L = lanes<T>;
    const int64_t taps = s.taps();
    for (int64_t row = first; row < last;) {
        const int64_t e = row / s.in, c = row % s.in, n = std::min(s.in - c, last - row);
        int64_t reads[I::order];
        for (int g = 0; g < I::order; g++) reads[g] = s.reads[g * taps + e];
        T *to = patches + row - first;
        for (int64_t p = 0; p < count; p++, to += LEADING) {
            const S *from[I::order];
            for (int g = 0; g < I::order; g++) from[g] = places[p * taps + reads[g]] + g * s.in + c;
            spans<L>(n, [&](auto size, int64_t i) {
                constexpr int N = decltype(size)::value;
                Vector<T, N> v[I::components];
                for (int g = 0; g < I::order; g++) v[g] = load<N>(from[g] + i);
                I::factors(v);
                for (int j = 0; j < I::components; j++) store<N>(to + j * component + i, v[j]);
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

// Fields with channels last to fields with channels last.
template <typename S, typename T, typename I, int LEADING>
void correlate(const S *field, const T *packed, const S *bias, const S *zeros, const Shape &s,
               const Panels<T, I> &panels, S *out, int threads) {
    constexpr int L = lanes<T>;
    constexpr int64_t component = component_of<LEADING>;
    const int64_t total = s.batch * s.pixels();
    // Tiles of equal size, in whole rows of accumulators.
    const int64_t most = tile_of(s), tiles = (total + most - 1) / most;
    const int64_t size = std::min(most, padded((total + tiles - 1) / tiles, rows_of_two));
    const int64_t count = (total + size - 1) / size, step = chunk(s.rows());
    const bool far = panels.size * int64_t(sizeof(T)) > near;  // the filters
#pragma omp parallel num_threads(threads) if (count > 1)
    {
        const FlushSubnormals flush;
        Scratch<S, T> &kept = scratch<S, T>();
        T *patches = kept.patches.reserve(I::components * component + LEADING * rows_of_one);
        T *sums = kept.sums.reserve(panels.sums + rows_of_one * panels.columns(I::count - 1));
        const S **places = kept.places.reserve(tile * s.taps());
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++) {
            const int64_t begin = t * size, pixels = std::min(size, total - begin);
            locate<S, I::order>(field, zeros, s, begin, pixels, s.taps(), 1, places);
            const int64_t steps_ahead = padded(pixels, rows_of_two) / rows_of_two * panels.products * s.rows();
            Ahead ahead(pixels_of(out, I::order * s.out, begin, pixels),
                        field_of_tile(field, I::order, s, begin + pixels, pixels),
                        far ? (steps_ahead + 1) / 2 : steps_ahead);
            for (int64_t row = 0; row < s.rows(); row += step) {
                const int64_t rows = std::min(step, s.rows() - row);
                gather<S, T, I, LEADING>(places, s, pixels, row, row + rows, patches);
                for (int b = 0; b < I::count; b++)
                    for (int64_t n = 0; n < panels.columns(b); n += 2 * L) {
                        const int parts = I::parts(b);
                        const int64_t width = panels.wide(b, n);
                        const T *right = packed + panels.at(b, 0, n) + row * width;
                        for (int copy = 0; copy < I::copies(b); copy++) {
                            const T *left = patches + (b + copy * parts) * component;
                            T *to = sums + panels.sum[b] + copy * tile * panels.columns(b) + n;
                            const int64_t wide = panels.columns(b);
                            const T *panel = far ? panels.after(packed, b, n, copy, row, rows) : nullptr;
                            // During the first half of the pixels the next panel, if it is far, then what is ahead.
                            const auto fetched = [&](int64_t p, int64_t at_once) {
                                if (!far || 2 * p >= pixels) return ahead.next(parts * rows);
                                const int64_t bytes = 4 * lanes<T> * sizeof(T) * at_once / (pixels * parts);
                                const char *start = reinterpret_cast<const char *>(panel);
                                return Run{start + p / at_once * bytes * parts * rows, bytes};
                            };
                            if (width == 2 * L)
                                for (int64_t p = 0; p < pixels; p += rows_of_two)
                                    multiply<T, LEADING, rows_of_two, 2>(left + p * LEADING, component, right,
                                                                panels.rows * width, parts, rows, to + p * wide, wide,
                                                                row == 0, fetched(p, rows_of_two));
                            else
                                for (int64_t p = 0; p < pixels; p += rows_of_one)
                                    multiply<T, LEADING, rows_of_one, 1>(left + p * LEADING, component, right,
                                                                panels.rows * width, parts, rows, to + p * wide, wide,
                                                                row == 0, fetched(p, rows_of_one));
                        }
                    }
            }
            const T *from[I::components];
            int64_t steps[I::components];
            for (int j = 0; j < I::components; j++) from[j] = sums + panels.sum_of(j, steps + j);
            for (int64_t p = 0; p < pixels; p++) {
                S *to = out + (begin + p) * I::order * s.out;
                spans<L>(s.out, [&](auto size, int64_t i) {
                    constexpr int N = decltype(size)::value;
                    Vector<T, N> v[I::components];
                    for (int j = 0; j < I::components; j++) v[j] = load<N>(from[j] + p * steps[j] + i);
                    if (bias) v[0] += load<N>(bias + i);
                    I::outputs(v);
                    for (int g = 0; g < I::order; g++) store<N>(to + g * s.out + i, v[g]);
                });
            }
        }
    }
}

// Adds what fields and gradients with channels last give to the transformed filters' gradients, `sums` of each thread.
template <typename S, typename T, typename I, int LEADING>
void correlate_filters(const S *field, const S *grad, const S *zeros, const Shape &s, const Panels<T, I> &panels,
                       T *sums, int threads) {
    constexpr int L = lanes<T>;
    constexpr int64_t component = component_of<LEADING>;
    const int64_t most = tile_of(s);
    const int64_t total = s.batch * s.pixels(), count = (total + most - 1) / most, step = chunk(s.rows());
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Scratch<S, T> &kept = scratch<S, T>();
        T *patches = kept.patches.reserve(I::components * component + LEADING * rows_of_one);
        T *grads = kept.sums.reserve(panels.sums + rows_of_one * panels.columns(I::count - 1));
        const S **places = kept.places.reserve(tile * s.taps());
        T *to[I::components];
        int64_t steps[I::components];
        for (int j = 0; j < I::components; j++) to[j] = grads + panels.sum_of(j, steps + j);
        T *own = sums + thread() * panels.size;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < count; t++) {
            const int64_t begin = t * most, pixels = std::min(most, total - begin);
            for (int64_t p = 0; p < pixels; p++) {
                const S *from = grad + (begin + p) * I::order * s.out;
                spans<L>(s.out, [&](auto size, int64_t i) {
                    constexpr int N = decltype(size)::value;
                    Vector<T, N> v[I::components];
                    for (int g = 0; g < I::order; g++) v[g] = load<N>(from + g * s.out + i);
                    I::gradients(v);
                    for (int j = 0; j < I::components; j++) store<N>(to[j] + p * steps[j] + i, v[j]);
                });
            }
            locate<S, I::order>(field, zeros, s, begin, pixels, s.taps(), 1, places);
            const int64_t end = begin + pixels;
            Ahead ahead(pixels_of(grad, I::order * s.out, end, std::min(pixels, total - end)),
                        field_of_tile(field, I::order, s, end, pixels),
                        padded(s.rows(), rows_of_two) / rows_of_two * panels.products * pixels);
            for (int64_t row = 0; row < s.rows(); row += step) {
                const int64_t rows = std::min(step, s.rows() - row);
                gather<S, T, I, LEADING>(places, s, pixels, row, row + rows, patches);
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
                                                                           into + k * width,
                                                                           ahead.next(pixels * I::copies(b)));
                            else
                                for (int64_t k = 0; k < rows; k += rows_of_one)
                                    multiply_transposed<T, LEADING, rows_of_one, 1>(left + k, next, right, tile * wide,
                                                                           I::copies(b), wide, pixels,
                                                                           into + k * width,
                                                                           ahead.next(pixels * I::copies(b)));
                        }
            }
        }
    }
}

template <typename S, typename T, typename I>
void run_in(const S *field, const S *filters, const S *bias, S *out, const Shape &s, bool last, bool swapped, int threads) {
    const Panels<T, I> panels(s.rows(), s.out);
    Scratch<S, T> &kept = scratch<S, T>();
    Buffer<T> more_packed;
    T *packed = room(kept.packed, more_packed, panels.size);
    const S *zeros = zeroed(kept.zeros, I::order * s.in);
    pack<S, T, I>(filters, s, swapped, panels, packed, threads);
    const auto correlated = [&](const Shape &one, const S *x, S *y) {
        by_leading<S>(s.rows(), [&](auto leading) {
            correlate<S, T, I, decltype(leading)::value>(x, packed, bias, zeros, one, panels, y, threads);
        });
    };
    if (last) return correlated(s, field, out);
    in_parts<S, T, I::order>(field, out, s, threads, correlated);
}

template <typename S, typename T, typename I>
void run_filters_in(const S *field, const S *grad, S *filters, const Shape &s, bool last, int threads) {
    const Panels<T, I> panels(s.rows(), s.out);
    Scratch<S, T> &kept = scratch<S, T>();
    Buffer<T> more_sums;
    T *sums = room(kept.packed, more_sums, threads * panels.size);
    std::memset(sums, 0, threads * panels.size * sizeof(T));
    const S *zeros = zeroed(kept.zeros, I::order * s.in);
    const auto add = [&](const Shape &one, const S *x, const S *dy) {
        by_leading<S>(s.rows(), [&](auto leading) {
            correlate_filters<S, T, I, decltype(leading)::value>(x, dy, zeros, one, panels, sums, threads);
        });
    };
    if (last) {
        add(s, field, grad);
    } else {
        in_parts<S, T, I::order>(field, grad, s, threads, add);
    }
    for (int64_t thread = 1; thread < threads; thread++)
        for (int64_t i = 0; i < panels.size; i++) sums[i] += sums[thread * panels.size + i];
    unpack<S, T, I>(sums, s, panels, filters, threads);
}

// Calls f with the irreps in the form of fewer products, from where these take longer than one more transform.
template <int ORDER, typename F>
void by_products(const Shape &s, F &&f) {
    if constexpr (ORDER == 4) {
        if (s.out >= 32) return f(Irreps<4, true>{});
    }
    f(Irreps<ORDER>{});
}

template <typename S, typename T, int ORDER>
void run(const S *field, const S *filters, const S *bias, S *out, const Shape &s, bool last, bool swapped, int threads) {
    by_products<ORDER>(s, [&](auto irreps) {
        run_in<S, T, decltype(irreps)>(field, filters, bias, out, s, last, swapped, threads);
    });
}

template <typename S, typename T, int ORDER>
void run_filters(const S *field, const S *grad, S *filters, const Shape &s, bool last, int threads) {
    by_products<ORDER>(
        s, [&](auto irreps) { run_filters_in<S, T, decltype(irreps)>(field, grad, filters, s, last, threads); });
}

template <typename F>
void by_order(int64_t order, F f) {
    if (order == 2) f(std::integral_constant<int, 2>{});
    if (order == 4) f(std::integral_constant<int, 4>{});
    if (order == 8) f(std::integral_constant<int, 8>{});
}

}  // namespace

#if defined(EQZOO_BFLOAT16) && defined(EQZOO_MULTIPLIES_BFLOAT16)
#define IN halves::
#define MULTIPLIES 1  // in bfloat16
#else
#define IN
#define MULTIPLIES 0
#endif

extern "C" void group_conv2d(const Scalar *field, const Scalar *filters, const Scalar *bias, Scalar *out,
        const int64_t *reads, const int64_t *places, int64_t order, int64_t batch, int64_t in, int64_t outs,
        int64_t height, int64_t width, int64_t out_height, int64_t out_width, int64_t side, int64_t stride,
        int64_t padding, int64_t dilation, int64_t last, int64_t swapped, int64_t threads) {
    const Shape s{batch, in, outs, height, width, out_height, out_width, side, stride, padding, dilation,
                  reads, places};
    by_order(order, [&](auto n) {
        IN run<Scalar, Real, decltype(n)::value>(field, filters, bias, out, s, last, swapped, int(threads));
    });
}
extern "C" void group_conv2d_filters(const Scalar *field, const Scalar *grad, Scalar *filters, const int64_t *reads,
        const int64_t *places, int64_t order, int64_t batch, int64_t in, int64_t outs, int64_t height, int64_t width,
        int64_t out_height, int64_t out_width, int64_t side, int64_t stride, int64_t padding, int64_t dilation,
        int64_t last, int64_t threads) {
    const Shape s{batch, in, outs, height, width, out_height, out_width, side, stride, padding, dilation,
                  reads, places};
    by_order(order, [&](auto n) {
        IN run_filters<Scalar, Real, decltype(n)::value>(field, grad, filters, s, last, int(threads));
    });
}

extern "C" int group_conv2d_multiplies() { return MULTIPLIES; }
