// What group convolutions through irreps share: vectors, the transforms over a group, the layout of fields.
#pragma once
#include <cstdlib>
#include <memory>
#include <utility>

#include "simd.h"

namespace {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int rows_of_two = 12, rows_of_one = 24;  // accumulators of 2 or 1 vectors that stay in 32 registers
#else
constexpr int rows_of_two = 6, rows_of_one = 12;  // in 16 registers
#endif

constexpr int64_t tile = 96;         // pixels at a time, a multiple of all numbers of rows
constexpr int64_t depth = 240;       // the most rows of the filters at a time, a multiple of all numbers of rows
constexpr int64_t near = 600000;     // bytes of filters that a cache holds beside a tile
constexpr int64_t slack = 64;        // numbers behind each buffer that a vector may touch

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
// filters of `parts` times as many columns, once for each of `copies` rows of the representation. The complex product of
// four rotations, (re kr + im ki, im kr - re ki), is one such block of four real products, or, with THREE, three blocks:
// with w = -re (kr + ki), u = im (ki - kr) and t = (re + im) kr it is (t + u, t + w).
template <int ORDER, bool THREE = false>
struct Irreps {
    static_assert(ORDER == 4 || !THREE);
    static constexpr int order = ORDER;
    static constexpr int count = ORDER == 8 || THREE ? 5 : ORDER == 4 ? 3 : 2;
    static constexpr int components = THREE ? 5 : ORDER;  // of a transform
    static constexpr int parts(int block) { return ORDER > 2 && !THREE && block == count - 1 ? 2 : 1; }
    static constexpr int copies(int block) { return ORDER == 8 && block == 4 ? 2 : 1; }
    // What the filters are multiplied by, so that the transposed transform undoes the transform.
    static constexpr double scale(int component) {
        return (component >= (ORDER == 2 ? 2 : ORDER / 2) ? 2.0 : 1.0) / ORDER;
    }
    // Where filters of each transform stand: in the part of the rows, the part of the columns, and with which sign.
    static constexpr int component(int block, int row, int column) {
        if (block < count - 1 || ORDER == 2 || THREE) return block;
        return ORDER == 4 ? 2 + (row ^ column) : 4 + 2 * column + row;
    }
    static constexpr int sign(int block, int row, int column) {
        return ORDER == 4 && !THREE && block == 2 && row == 0 && column == 1 ? -1 : 1;
    }

    // From the poses of a field to the left factors of the products, and from sums of products to the poses of the
    // output, each in place.
    template <typename V>
    static void factors(V *v) {
        transform<ORDER>(v);
        if constexpr (THREE) v[4] = v[2] + v[3];
    }
    template <typename V>
    static void outputs(V *v) {
        if constexpr (THREE) {
            const V w = v[2];
            v[2] = v[4] + v[3], v[3] = v[4] + w;
        }
        transposed<ORDER>(v);
    }
    // The transpose of `outputs`.
    template <typename V>
    static void gradients(V *v) {
        transform<ORDER>(v);
        if constexpr (THREE) {
            const V re = v[2];
            v[2] = v[3], v[3] = re, v[4] = v[2] + v[3];
        }
    }
    // From the poses of a filter to the right factors, and the transpose of that.
    template <typename V>
    static void filters(V *v) {
        transform<ORDER>(v);
        for (int j = 0; j < ORDER; j++) v[j] = v[j] * float(scale(j));
        if constexpr (THREE) {
            const V kr = v[2], ki = v[3];
            v[2] = -kr - ki, v[3] = ki - kr, v[4] = kr;
        }
    }
    template <typename V>
    static void filter_gradients(V *v) {
        if constexpr (THREE) {
            const V w = v[2], u = v[3];
            v[2] = v[4] - u - w, v[3] = u - w;
        }
        for (int j = 0; j < ORDER; j++) v[j] = v[j] * float(scale(j));
        transposed<ORDER>(v);
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

// One step of transposing L vectors of L numbers: exchanges the D off the diagonal in each square of 2D.
template <int D, typename V, size_t... I>
inline void exchange(V &a, V &b, std::index_sequence<I...>) {
    constexpr size_t n = sizeof...(I);
    const V low = shuffled<(I & D ? I - D + n : I)...>(a, b);
    b = shuffled<(I & D ? I + n : I + D)...>(a, b);
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

// Transposes a (rows, columns) matrix, in T: to[j·to_step + i] = from[i·from_step + j]; in blocks of L, the largest that fit.
template <typename T, int L = std::min(lanes<T>, 16), typename A, typename B>
void transpose(const A *from, int64_t from_step, int64_t rows, int64_t columns, B *to, int64_t to_step) {
    if constexpr (L > 1) {
        if (rows < L || columns < L) return transpose<T, L / 2>(from, from_step, rows, columns, to, to_step);
        using V = Vector<T, L>;
        const auto block = [&](int64_t i, int64_t j) {
            V r[L];
#pragma GCC unroll 16
            for (int l = 0; l < L; l++) r[l] = load<L>(from + (i + l) * from_step + j);
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
            for (int64_t j = 0; j < columns; j++) store<1>(to + j * to_step + i, load<1>(from + i * from_step + j));
    }
}

// L filters, `step` apart, of so many entries: to[q·L + l] is entry q of filter l, 0 from the filter `count` on.
template <typename S, typename T, int L = lanes<T>>
void interleave(const S *filters, int64_t step, int64_t count, int64_t entries, T *to) {
    if (count == L) return transpose<T>(filters, step, L, entries, to, L);
    for (int64_t l = 0; l < L; l++)
        for (int64_t q = 0; q < entries; q++) to[q * L + l] = l < count ? upcast(filters[l * step + q]) : T(0);
}

// The inverse of `interleave`.
template <typename S, typename T, int L = lanes<T>>
void separate(const T *from, int64_t step, int64_t count, int64_t entries, S *filters) {
    if (count == L) return transpose<T>(from, L, entries, L, filters, step);
    for (int64_t l = 0; l < count; l++)
        for (int64_t q = 0; q < entries; q++) downcast(from[q * L + l], filters + l * step + q);
}

// Where the taps of a tile's pixels are in a field, `zeros` outside of it; in steps from pixel to pixel and tap to tap.
template <typename S, int ORDER>
void locate(const S *field, const S *zeros, const Shape &s, int64_t first, int64_t count, int64_t pixel_step,
            int64_t tap_step, const S **places) {
    const int64_t unit = ORDER * s.in;
    int64_t b = first / s.pixels(), y = first % s.pixels() / s.out_width, x = first % s.out_width;
    for (int64_t p = 0; p < count; p++, places += pixel_step) {
        const int64_t top = y * s.stride - s.padding, left = x * s.stride - s.padding;
        const S *corner = field + ((b * s.height + top) * s.width + left) * unit;
        const int64_t reach = (s.side - 1) * s.dilation;
        const S **place = places;
        if (top >= 0 && left >= 0 && top + reach < s.height && left + reach < s.width) {
            for (int64_t i = 0; i < s.side; i++)
                for (int64_t j = 0; j < s.side; j++)
                    *place = corner + (i * s.width + j) * s.dilation * unit, place += tap_step;
        } else {
            for (int64_t i = 0, row = top; i < s.side; i++, row += s.dilation)
                for (int64_t j = 0, column = left; j < s.side; j++, column += s.dilation) {
                    const bool inside = row >= 0 && row < s.height && column >= 0 && column < s.width;
                    *place = inside ? corner + (i * s.width + j) * s.dilation * unit : zeros, place += tap_step;
                }
        }
        if (++x == s.out_width) {
            x = 0;
            if (++y == s.out_height) y = 0, b++;
        }
    }
}

// A run of memory. During products, `bytes` for each step of their sums are fetched into the caches.
struct Run {
    const char *from;
    int64_t bytes;
};

// What is needed soon: two runs, one after the other, divided among so many steps.
class Ahead {
   public:
    Ahead(Run first, Run second, int64_t steps)
        : first_(first), second_(second), bytes_(first.bytes + second.bytes), steps_(steps) {}
    Run next(int64_t steps) {
        const int64_t at = bytes_ * done_ / steps_;
        done_ += steps;
        const char *from = at < first_.bytes ? first_.from + at : second_.from + (at - first_.bytes);
        return {from, (bytes_ + steps_ - 1) / steps_};
    }

   private:
    const Run first_, second_;
    const int64_t bytes_, steps_;
    int64_t done_ = 0;
};

template <typename S>
Run pixels_of(const S *x, int64_t unit, int64_t first, int64_t count) {
    return {reinterpret_cast<const char *>(x + first * unit), count * unit * int64_t(sizeof(S))};
}

// What a tile reads of a field and the tile before it did not, about: each has its share, half the filters' reach below.
template <typename S>
Run field_of_tile(const S *field, int64_t order, const Shape &s, int64_t begin, int64_t pixels) {
    const int64_t all = s.batch * s.height * s.width, total = s.batch * s.pixels();
    const int64_t first = std::min(all, all * begin / total + (s.side - 1) * s.dilation * s.width / 2);
    return pixels_of(field, order * s.in, first, std::min(all - first, all * pixels / total));
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

}  // namespace
