// Depthwise correlation with a filter at every pixel, and its gradients.
//
// All loops run over flattened pixels: the neighbor at offset (i, j) is i·width + j pixels on. Where that crosses a side
// of the image it is a pixel of another row, and a mask sets its factor to zero; above and below are zeros, in a copy of
// the planes that share a filter. So no loop has a branch for the borders.
#include <memory>
#include <vector>

#include "simd.h"

namespace {

// Eight sums of so many vectors each stay in registers, of which AVX-512 has 32.
constexpr int unroll = vector_bytes == 64 ? 2 : 1, product_unroll = vector_bytes == 64 ? 3 : 1;

// Calls f with n, 1 to N, as a compile-time constant.
template <int N, typename F>
inline void known(int64_t n, F f) {
    if constexpr (N > 1) {
        if (n < N) return known<N - 1>(n, f);
    }
    f(std::integral_constant<int, N>{});
}

// Divides 0..total into parts of at most N, of sizes that differ by at most 1, and calls f(first, size).
template <int N, typename F>
inline void parts(int64_t total, F f) {
    const int64_t count = (total + N - 1) / N;
    for (int64_t i = 0; i < count; i++) {
        const int64_t first = total * i / count;
        known<N>(total * (i + 1) / count - first, [&](auto size) { f(first, size); });
    }
}

// Calls f(V, U, p) for blocks of U vectors at pixel p. The last block overlaps the one before, so f must assign, not
// add. Images smaller than a vector are processed pixel by pixel.
template <typename T, int U, typename F>
inline void blocks(int64_t pixels, F f) {
    using V = Vector<T>;
    int64_t p = 0;
    if (pixels < lanes<T>) {
        for (; p < pixels; p++) f(T(), std::integral_constant<int, 1>{}, p);
        return;
    }
    for (; p + U * lanes<T> <= pixels; p += U * lanes<T>) f(V(), std::integral_constant<int, U>{}, p);
    for (; p + lanes<T> <= pixels; p += lanes<T>) f(V(), std::integral_constant<int, 1>{}, p);
    if (p < pixels) f(V(), std::integral_constant<int, 1>{}, pixels - lanes<T>);
}

struct Shape {
    int64_t batch, channels, order, slices, height, width, side;
    int64_t tap_step;  // from an offset of a filter to the next

    int64_t pixels() const { return height * width; }
    int64_t taps() const { return side * side; }
    int64_t shared() const { return channels / slices; }
    int64_t step() const { return order * pixels(); }  // from a channel of the field to the next
    int64_t reach() const { return side / 2 * (width + 1); }
    int64_t offset(int64_t d) const { return (d / side - side / 2) * width + d % side - side / 2; }
};

// The planes that share a filter, with zeros before and after each.
template <typename T>
class Planes {
   public:
    explicit Planes(const Shape &s) : s_(s), data_(s.shared() * step()) {}

    int64_t step() const { return s_.pixels() + 2 * s_.reach(); }
    const T *at(int64_t offset) const { return data_.data() + s_.reach() + offset; }

    void fill(const T *field) {
        for (int64_t c = 0; c < s_.shared(); c++)
            std::copy_n(field + c * s_.step(), s_.pixels(), data_.data() + c * step() + s_.reach());
    }

   private:
    const Shape s_;
    std::vector<T> data_;
};

// For each column of the window, 1 at the pixels whose neighbor is in the image and 0 at the others, with zeros before
// and after.
template <typename T>
class Masks {
   public:
    explicit Masks(const Shape &s) : s_(s), data_(s.side * step()) {
        for (int64_t j = 0; j < s.side; j++)
            for (int64_t p = 0; p < s.pixels(); p++) {
                const int64_t x = p % s.width + j - s.side / 2;
                data_[j * step() + s.reach() + p] = x >= 0 && x < s.width ? T(1) : T(0);
            }
    }

    const T *at(int64_t d) const { return data_.data() + d % s_.side * step() + s_.reach(); }

   private:
    int64_t step() const { return s_.pixels() + 2 * s_.reach(); }

    const Shape s_;
    std::vector<T> data_;
};

// The addresses that a thread reads at each offset of the window.
template <typename T>
struct Reads {
    explicit Reads(const Shape &s) : tap(s.taps()), mask(s.taps()), field(s.taps()) {}

    std::vector<const T *> tap, mask, field;
};

// out(c, p) = Σ_d tap[d][p] · mask[d][p] · field[d][c·plane + p]
template <typename T>
void filtered_sum(const Shape &s, const Reads<T> &read, int64_t plane, T *out) {
    parts<8>(s.shared(), [&](int64_t first, auto channels) {
        blocks<T, unroll>(s.pixels(), [&](auto zero, auto vectors, int64_t p) {
            using V = decltype(zero);
            constexpr int C = decltype(channels)::value, U = decltype(vectors)::value, count = sizeof(V) / sizeof(T);
            V sum[C][U] = {};
            for (int64_t d = 0; d < s.taps(); d++) {
                const T *from = read.field[d] + first * plane + p;
#pragma GCC unroll 8
                for (int u = 0; u < U; u++) {
                    const V tap = load_as<V>(read.tap[d] + p + u * count) * load_as<V>(read.mask[d] + p + u * count);
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) sum[c][u] += tap * load_as<V>(from + c * plane + u * count);
                }
            }
            for (int c = 0; c < C; c++) std::memcpy(out + (first + c) * s.step() + p, sum[c], sizeof sum[c]);
        });
    });
}

// grad_tap(d, p) = mask[d][p] · Σ_c grad(c, p) · field[d][c·plane + p]
template <typename T>
void tap_gradient(const Shape &s, const T *grad, const Reads<T> &read, int64_t plane, T *grad_tap) {
    blocks<T, unroll>(s.pixels(), [&](auto zero, auto vectors, int64_t p) {
        using V = decltype(zero);
        constexpr int U = decltype(vectors)::value, count = sizeof(V) / sizeof(T);
        parts<8>(s.taps(), [&](int64_t first, auto taps) {
            constexpr int D = decltype(taps)::value;
            V sum[D][U] = {};
            for (int64_t c = 0; c < s.shared(); c++) {
#pragma GCC unroll 8
                for (int u = 0; u < U; u++) {
                    const V gradient = load_as<V>(grad + c * s.step() + p + u * count);
#pragma GCC unroll 8
                    for (int d = 0; d < D; d++)
                        sum[d][u] += gradient * load_as<V>(read.field[first + d] + c * plane + p + u * count);
                }
            }
            for (int d = 0; d < D; d++) {
                for (int u = 0; u < U; u++) sum[d][u] *= load_as<V>(read.mask[first + d] + p + u * count);
                std::memcpy(grad_tap + (first + d) * s.tap_step + p, sum[d], sizeof sum[d]);
            }
        });
    });
}

// The scratch of a thread: a copy of the planes, and the addresses of planes and filters at each offset.
template <typename T>
class Worker {
   public:
    Worker(const Shape &s, const Masks<T> &masks) : s_(s), planes_(s), near_(s), far_(s) {
        for (int64_t d = 0; d < s.taps(); d++) {
            near_.mask[d] = masks.at(d);
            near_.field[d] = planes_.at(s.offset(d));
            far_.mask[d] = masks.at(d) - s.offset(d);
            far_.field[d] = planes_.at(-s.offset(d));
        }
    }

    void sum(const T *filter, const T *value, T *out) {
        for (int64_t d = 0; d < s_.taps(); d++) near_.tap[d] = filter + d * s_.tap_step;
        planes_.fill(value);
        filtered_sum(s_, near_, planes_.step(), out);
    }

    void filter_gradient(const T *grad, const T *value, T *grad_filter) {
        planes_.fill(value);
        tap_gradient(s_, grad, near_, planes_.step(), grad_filter);
    }

    // grad_value(c, q) = Σ_d tap[d][q − d] · grad(c, q − d). Filters are read up to s.reach() pixels before and
    // after their own, where the gradient is zero, so the memory there must hold finite numbers.
    void value_gradient(const T *filter, const T *grad, T *grad_value) {
        for (int64_t d = 0; d < s_.taps(); d++) far_.tap[d] = filter + d * s_.tap_step - s_.offset(d);
        planes_.fill(grad);
        filtered_sum(s_, far_, planes_.step(), grad_value);
    }

   private:
    const Shape s_;
    Planes<T> planes_;
    Reads<T> near_, far_;
};

// out[r][p] = first[r·row] + Σ_k a[r·row + k·column] · b[k][p]; first may be null, for zeros.
template <typename T>
void product(int64_t rows, int64_t depth, int64_t pixels, const T *a, int64_t row, int64_t column, const T *first,
             const T *const *b, T *const *out) {
    blocks<T, product_unroll>(pixels, [&](auto zero, auto vectors, int64_t p) {
        using V = decltype(zero);
        constexpr int U = decltype(vectors)::value, count = sizeof(V) / sizeof(T);
        parts<8>(rows, [&](int64_t r0, auto size) {
            constexpr int R = decltype(size)::value;
            V sum[R][U];
            for (int r = 0; r < R; r++)
                for (int u = 0; u < U; u++) sum[r][u] = V{} + (first ? first[(r0 + r) * row] : T(0));
            const T *factor = a + r0 * row;
            for (int64_t k = 0; k < depth; k++) {
                V x[U];
                for (int u = 0; u < U; u++) x[u] = load_as<V>(b[k] + p + u * count);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const T f = factor[r * row + k * column];
#pragma GCC unroll 8
                    for (int u = 0; u < U; u++) sum[r][u] += f * x[u];
                }
            }
            for (int r = 0; r < R; r++) std::memcpy(out[r0 + r] + p, sum[r], sizeof sum[r]);
        });
    });
}

// out(r, k) += Σ_p a[r][p] · b[k][p], with b padded by zeros to a multiple of the vector length.
template <typename T>
void inner_products(int64_t rows, int64_t columns, int64_t pixels, const T *const *a, const T *const *b, T *out) {
    using V = Vector<T>;
    parts<4>(rows, [&](int64_t r0, auto r_size) {
        parts<product_unroll == 3 ? 6 : 2>(columns, [&](int64_t k0, auto k_size) {
            constexpr int R = decltype(r_size)::value, K = decltype(k_size)::value;
            V sum[R][K] = {};
            for (int64_t p = 0; p < pixels; p += lanes<T>) {
                V x[K];
#pragma GCC unroll 8
                for (int k = 0; k < K; k++) x[k] = load_as<V>(b[k0 + k] + p);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const V f = load_as<V>(a[r0 + r] + p);
#pragma GCC unroll 8
                    for (int k = 0; k < K; k++) sum[r][k] += f * x[k];
                }
            }
            for (int r = 0; r < R; r++)
                for (int k = 0; k < K; k++)
                    out[(r0 + r) * columns + k0 + k] +=
                        lane_sum<T>(&sum[r][k]);
        });
    });
}

// The filters of a few images and one element, generated from hidden fields: one row of pixels for each slice and
// offset. A row of the map has a factor for each hidden field, and a constant.
template <typename T>
class Generator {
   public:
    Generator(const Shape &s, int64_t fields, const Masks<T> &masks)
        : worker(s, masks), s_(s), fields_(fields), memory_(count() * s.tap_step + 2 * s.reach()),
          copies_((fields + 1) * s.tap_step), filters_(count()), copied_(fields), hidden_(fields + 1) {
        for (int64_t r = 0; r < count(); r++) filters_[r] = filter(0, 0) + r * s.tap_step;
        for (int64_t j = 0; j < fields; j++) copied_[j] = copies_.data() + j * s.tap_step;
        hidden_[fields] = copies_.data() + fields * s.tap_step;
    }

    Worker<T> worker;

    int64_t count() const { return s_.slices * s_.taps(); }
    int64_t columns() const { return fields_ + 1; }

    // The number of images at a time: enough for long loops, few enough for their filters to stay in a core's cache.
    static int64_t together(const Shape &s) {
        const int64_t room = (1 << 19) / sizeof(T) / (s.slices * s.taps() * s.pixels());
        return std::max<int64_t>(1, std::min({s.batch, 512 / s.pixels(), room}));
    }

    // The pitch of rows, a multiple of the vector length.
    static int64_t step(const Shape &s) {
        return (together(s) * s.pixels() + lanes<T> - 1) / lanes<T> * lanes<T>;
    }

    // Reads the hidden fields of an element, from the first image on: in place, or from copies in which the images are
    // contiguous. The last row is all ones.
    void read(const T *hidden, int64_t images) {
        pixels_ = images * s_.pixels();
        in_place_ = images == 1 && pixels_ == s_.tap_step;
        for (int64_t j = 0; j < fields_; j++) {
            hidden_[j] = in_place_ ? hidden + j * s_.step() : copied_[j];
            for (int64_t i = 0; i < images && !in_place_; i++)
                std::copy_n(hidden + (i * fields_ + j) * s_.step(), s_.pixels(), copied_[j] + i * s_.pixels());
        }
        T *ones = copies_.data() + fields_ * s_.tap_step;
        std::fill_n(ones, pixels_, T(1));
        for (T *row = copies_.data(); row <= ones; row += s_.tap_step)
            std::fill(row + pixels_, row + s_.tap_step, T(0));
    }

    T *filter(int64_t slice, int64_t image) {
        return memory_.data() + s_.reach() + slice * s_.taps() * s_.tap_step + image * s_.pixels();
    }

    void generate(const T *map) {
        product<T>(count(), fields_, pixels_, map, columns(), 1, map + fields_, hidden_.data(), filters_.data());
    }

    // From the gradient of the filters, which has overwritten the filters, to those of the map and the hidden fields.
    void backward(const T *map, T *grad_map, T *grad_hidden) {
        inner_products<T>(count(), columns(), pixels_, filters_.data(), hidden_.data(), grad_map);
        if (in_place_)
            for (int64_t j = 0; j < fields_; j++) copied_[j] = grad_hidden + j * s_.step();
        product<T>(fields_, count(), pixels_, map, 1, columns(), nullptr, filters_.data(), copied_.data());
        for (int64_t j = 0; j < fields_; j++) {
            for (int64_t i = 0; i * s_.pixels() < pixels_ && !in_place_; i++)
                std::copy_n(copied_[j] + i * s_.pixels(), s_.pixels(), grad_hidden + (i * fields_ + j) * s_.step());
            copied_[j] = copies_.data() + j * s_.tap_step;
        }
    }

   private:
    const Shape s_;
    const int64_t fields_;
    std::vector<T> memory_, copies_;
    std::vector<T *> filters_, copied_;
    std::vector<const T *> hidden_;
    int64_t pixels_ = 0;
    bool in_place_ = false;
};

// Calls f(generator, element, offset of its hidden fields, images, a function that calls for all slices and images).
template <typename T, typename F>
void each_generated(Shape s, int64_t fields, int64_t threads, F f) {
    const int64_t together = Generator<T>::together(s);
    s.tap_step = Generator<T>::step(s);
    const Masks<T> masks(s);
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Generator<T> generator(s, fields, masks);
#pragma omp for collapse(2) schedule(static)
        for (int64_t h = 0; h < s.order; h++)
            for (int64_t b = 0; b < s.batch; b += together) {
                const int64_t images = std::min(together, s.batch - b);
                auto all = [&](auto call) {
                    for (int64_t i = 0; i < images; i++)
                        for (int64_t slice = 0; slice < s.slices; slice++)
                            call(generator.filter(slice, i),
                                 (((b + i) * s.channels + slice * s.shared()) * s.order + h) * s.pixels());
                };
                f(generator, h, (b * fields * s.order + h) * s.pixels(), images, all);
            }
    }
}

template <typename T>
void generated_forward(const T *hidden, const T *map, const T *value, T *out, const Shape &s, int64_t fields,
                       int64_t threads) {
    each_generated<T>(s, fields, threads, [&](auto &generator, int64_t h, int64_t place, int64_t images, auto all) {
        generator.read(hidden + place, images);
        generator.generate(map + h * generator.count() * generator.columns());
        all([&](T *filter, int64_t field) { generator.worker.sum(filter, value + field, out + field); });
    });
}

// grad_value, or grad_hidden for the gradients of hidden fields and map, may be null and is not computed then. The
// gradient of the map has a part for each thread.
template <typename T>
void generated_backward(const T *grad, const T *hidden, const T *map, const T *value, T *grad_hidden, T *grad_maps,
                        T *grad_value, const Shape &s, int64_t fields, int64_t threads) {
    each_generated<T>(s, fields, threads, [&](auto &generator, int64_t h, int64_t place, int64_t images, auto all) {
        const int64_t size = generator.count() * generator.columns();
        generator.read(hidden + place, images);
        if (grad_value) {
            generator.generate(map + h * size);
            all([&](T *filter, int64_t field) {
                generator.worker.value_gradient(filter, grad + field, grad_value + field);
            });
        }
        if (grad_hidden) {
            all([&](T *filter, int64_t field) {
                generator.worker.filter_gradient(grad + field, value + field, filter);
            });
            generator.backward(map + h * size, grad_maps + (thread() * s.order + h) * size, grad_hidden + place);
        }
    });
}

}  // namespace

#define SIZES                                                                                                          \
    int64_t batch, int64_t channels, int64_t order, int64_t slices, int64_t height, int64_t width, int64_t side
#define SHAPE Shape{batch, channels, order, slices, height, width, side, height * width}
extern "C" {
void generated_depthwise(const Scalar *hidden, const Scalar *map, const Scalar *value, Scalar *out, SIZES,
        int64_t fields, int64_t threads) {
    generated_forward<Scalar>(hidden, map, value, out, SHAPE, fields, threads);
}
void generated_depthwise_backward(const Scalar *grad, const Scalar *hidden, const Scalar *map, const Scalar *value,
        Scalar *grad_hidden, Scalar *grad_maps, Scalar *grad_value, SIZES, int64_t fields, int64_t threads) {
    generated_backward<Scalar>(grad, hidden, map, value, grad_hidden, grad_maps, grad_value, SHAPE, fields, threads);
}
}
