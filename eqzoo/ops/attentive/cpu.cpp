// Reductions of the responses of a group convolution, computed without storing the responses.
//
// A lane is an output plane o: filters, attention, and sums and maxima over pixels, poses and channels stay in their
// lanes, whatever the size of the image, and a value of the input is one factor for all lanes. Only the gradient of the
// input is a sum over lanes.
#include <vector>

#include "simd.h"

namespace {

template <typename T> using IntOf = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;
template <typename T> using Int = Vector<IntOf<T>>;
// The same number in all lanes.
template <typename T> Int<T> all_lanes(int64_t i) { return Int<T>{} + static_cast<IntOf<T>>(i); }
// Calls f(J, j) for J columns from column j on, with J of 8, 4, 2 and 1: eight where vectors are narrow, because with
// fewer sums the processor would wait for each.
template <typename F> inline void neighbors(int64_t columns, F &&f) {
    int64_t j = 0;
    if constexpr (vector_bytes < 64)
        for (; j + 8 <= columns; j += 8) f(std::integral_constant<int, 8>{}, j);
    for (; j + 4 <= columns; j += 4) f(std::integral_constant<int, 4>{}, j);
    for (; j + 2 <= columns; j += 2) f(std::integral_constant<int, 2>{}, j);
    for (; j < columns; j++) f(std::integral_constant<int, 1>{}, j);
}

struct Shape {
    int64_t batch, channels, poses, out, k, height, width, rows, columns, stride, padding, dilation, n,
        attention_dilation;
    int64_t planes() const { return channels * poses; }
    int64_t taps() const { return k * k; }
    int64_t span() const { return dilation * (k - 1) + 1; }
    int64_t padded_height() const { return height + 2 * padding; }
    int64_t padded_width() const { return width + 2 * padding; }
    int64_t pixels() const { return rows * columns; }
    template <typename T> int64_t blocks() const { return (out + lanes<T> - 1) / lanes<T>; }
};

// Vectors in memory, which new aligns to their size.
template <typename T> using Vectors = std::vector<Vector<T>>;

template <typename T> Vector<T> load(const T *from, int64_t n) {
    Vector<T> v = {};
    if (n >= lanes<T>)
        std::memcpy(&v, from, sizeof v);
    else
        std::memcpy(&v, from, n * sizeof(T));
    return v;
}

template <typename T> void store(T *to, const Vector<T> &v, int64_t n) {
    if (n >= lanes<T>)
        std::memcpy(to, &v, sizeof v);
    else
        std::memcpy(to, &v, n * sizeof(T));
}

template <typename T> Vector<T> sigmoid(const Vector<T> &z) {
    const T most = sizeof(T) == 4 ? 80 : 700;
    T parts[lanes<T>];
    std::memcpy(parts, &z, sizeof z);
#pragma omp simd
    for (int l = 0; l < lanes<T>; l++) {
        T y = -parts[l] > most ? most : -parts[l];
        parts[l] = 1 / (1 + fast_exp(y));
    }
    Vector<T> s;
    std::memcpy(&s, parts, sizeof s);
    return s;
}

// The plane with its zero padding; without padding, the plane itself.
template <typename T> const T *pad(const T *plane, T *room, const Shape &s) {
    if (s.padding == 0) return plane;
    for (int64_t i = 0; i < s.height; i++)
        std::memcpy(room + (i + s.padding) * s.padded_width() + s.padding, plane + i * s.width, s.width * sizeof(T));
    return room;
}

// Filters by lanes: (O, C, S, k, k) to (S, blocks, C, k, k) vectors, zero where there is no plane.
template <typename T> Vectors<T> pack_filters(const T *w, const Shape &s) {
    const int64_t blocks = s.blocks<T>(), taps = s.taps();
    Vectors<T> packed(s.poses * blocks * s.channels * taps);
    T *to = reinterpret_cast<T *>(packed.data());
    for (int64_t o = 0; o < s.out; o++)
        for (int64_t c = 0; c < s.channels; c++)
            for (int64_t p = 0; p < s.poses; p++)
                for (int64_t t = 0; t < taps; t++)
                    to[(((p * blocks + o / lanes<T>)*s.channels + c) * taps + t) * lanes<T> + o % lanes<T>] = *w++;
    return packed;
}

// The filters of the spatial attention: (O, 2, S, n, n) to (S, blocks, n, n, 2) vectors. Those of the mean include 1 / C.
template <typename T> Vectors<T> pack_spatial(const T *psi, const Shape &s) {
    const int64_t blocks = s.blocks<T>(), taps = s.n * s.n;
    Vectors<T> packed(s.poses * blocks * taps * 2);
    T *to = reinterpret_cast<T *>(packed.data());
    for (int64_t o = 0; o < s.out; o++)
        for (int64_t statistic = 0; statistic < 2; statistic++)
            for (int64_t p = 0; p < s.poses; p++)
                for (int64_t t = 0; t < taps; t++)
                    to[(((p * blocks + o / lanes<T>)*taps + t) * 2 + statistic) * lanes<T> + o % lanes<T>] =
                        statistic ? *psi++ : *psi++ / s.channels;
    return packed;
}

// The responses of J neighbors in a row, for all lanes. K is the side of the filter and UNIT a stride of 1, where
// the compiler may know them; K = 0 reads the side from the shape.
template <int K, bool UNIT, int J, typename T>
inline void respond(const T *x, const Vector<T> *w, const Shape &s, Vector<T> *r) {
    const int64_t k = K ? K : s.k, stride = UNIT ? 1 : s.stride, row = s.dilation * s.padded_width();
    for (int j = 0; j < J; j++) r[j] = Vector<T>{};
    for (int64_t u = 0; u < k; u++)
        for (int64_t v = 0; v < k; v++) {
            const T *from = x + u * row + v * s.dilation;
            const Vector<T> tap = w[u * k + v];
            for (int j = 0; j < J; j++) r[j] += tap * from[j * stride];
        }
}

template <int K, bool UNIT, int J, typename T>
inline void peak_of(const T *x, const Vector<T> *w, const Shape &s, int64_t place, Vector<T> &best, Int<T> &where) {
    Vector<T> r[J];
    respond<K, UNIT, J, T>(x, w, s, r);
    for (int j = 0; j < J; j++) {
        const Int<T> more = r[j] > best;
        best = more ? r[j] : best;
        where = more ? all_lanes<T>(place + j) : where;
    }
}

template <int K, bool UNIT, typename T>
void peak(const T *x, const T *w, T *peaks, int32_t *places, const Shape &s, int64_t threads) {
    const int64_t blocks = s.blocks<T>(), stride = UNIT ? 1 : s.stride;
    const Vectors<T> filters = pack_filters(w, s);
    share(s.batch * s.planes(), threads, [&](int64_t, int64_t begin, int64_t end) {
        std::vector<T> room(s.padding ? s.padded_height() * s.padded_width() : 0);
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / s.planes(), c = task % s.planes() / s.poses, p = task % s.poses;
            const T *plane = pad(x + task * s.height * s.width, room.data(), s);
            for (int64_t block = 0; block < blocks; block++) {
                const Vector<T> *taps = &filters[((p * blocks + block) * s.channels + c) * s.taps()];
                Vector<T> best = Vector<T>{} - std::numeric_limits<T>::infinity();
                Int<T> where = {};
                for (int64_t i = 0; i < s.rows; i++) {
                    const T *row = plane + i * stride * s.padded_width();
                    neighbors(s.columns, [&](auto count, int64_t j) {
                        peak_of<K, UNIT, decltype(count)::value, T>(row + j * stride, taps, s, i * s.columns + j, best,
                                                                    where);
                    });
                }
                const int64_t first = block * lanes<T>, valid = std::min<int64_t>(lanes<T>, s.out - first);
                const int64_t at = ((b * s.poses + p) * s.channels + c) * s.out + first;
                store(peaks + at, best, valid);
                for (int64_t l = 0; l < valid; l++) places[at + l] = static_cast<int32_t>(where[l]);
            }
        }
    });
}

// One task for each plane of the input, which writes its own part of both gradients.
template <typename T>
void peak_backward(const T *x, const T *w, const int32_t *places, const T *g, T *grad_x, T *grad_w, const Shape &s,
                   int64_t threads) {
    const int64_t size = s.padded_height() * s.padded_width(), k = s.k;
    share(s.planes(), threads, [&](int64_t, int64_t begin, int64_t end) {
        std::vector<T> room(size), sums(size), grad_filters(s.out * s.taps());
        for (int64_t task = begin; task < end; task++) {
            const int64_t c = task / s.poses, p = task % s.poses;
            std::fill(grad_filters.begin(), grad_filters.end(), T(0));
            for (int64_t b = 0; b < s.batch; b++) {
                const T *plane = pad(x + (b * s.planes() + task) * s.height * s.width, room.data(), s);
                std::fill(sums.begin(), sums.end(), T(0));
                const int64_t at = ((b * s.poses + p) * s.channels + c) * s.out;
                for (int64_t o = 0; o < s.out; o++) {
                    const int64_t i = places[at + o] / s.columns, j = places[at + o] % s.columns;
                    const int64_t corner = (i * s.padded_width() + j) * s.stride;
                    const T grad_peak = g[at + o], *taps = w + (o * s.planes() + task) * s.taps();
                    T *to = &grad_filters[o * s.taps()];
                    for (int64_t u = 0; u < k; u++) {
                        const int64_t row = corner + u * s.dilation * s.padded_width();
                        for (int64_t v = 0; v < k; v++) {
                            to[u * k + v] += grad_peak * plane[row + v * s.dilation];
                            sums[row + v * s.dilation] += grad_peak * taps[u * k + v];
                        }
                    }
                }
                for (int64_t i = 0; i < s.height; i++)
                    std::memcpy(grad_x + ((b * s.planes() + task) * s.height + i) * s.width,
                                &sums[(i + s.padding) * s.padded_width() + s.padding], s.width * sizeof(T));
            }
            for (int64_t o = 0; o < s.out; o++)
                std::memcpy(grad_w + (o * s.planes() + task) * s.taps(), &grad_filters[o * s.taps()],
                            s.taps() * sizeof(T));
        }
    });
}

// Maps of the spatial attention with zero padding left and right, and a width that is a multiple of four.
struct Maps {
    int64_t rows, columns, n, reach, step, width;
    explicit Maps(const Shape &s)
        : rows(s.rows), columns(s.columns), n(s.n), reach(s.attention_dilation * (s.n / 2)),
          step(s.attention_dilation), width((s.columns + 3) / 4 * 4 + 2 * reach) {}
    int64_t size() const { return rows * width; }
    int64_t at(int64_t i, int64_t j) const { return i * width + reach + j; }
    // Calls with every row of the filter that overlaps the map at row i, and that row of the map.
    template <typename F> void meet(int64_t i, F work) const {
        for (int64_t u = 0; u < n; u++) {
            const int64_t from = i + u * step - reach;
            if (from >= 0 && from < rows) work(u, from);
        }
    }
};

// z = psi * [U, M], at all pixels.
template <typename T>
void spatial_logits(const Vector<T> *sums, const Vector<T> *peaks, const Vector<T> *psi, const Maps &m, Vector<T> *z) {
    for (int64_t i = 0; i < m.rows; i++)
        for (int64_t j = 0; j < m.columns; j += 4) {
            Vector<T> a[4] = {}, b[4] = {};
            m.meet(i, [&](int64_t u, int64_t from) {
                const Vector<T> *p = psi + u * m.n * 2, *x = sums + from * m.width + j, *y = peaks + from * m.width + j;
                for (int64_t v = 0; v < m.n; v++, p += 2, x += m.step, y += m.step)
                    for (int l = 0; l < 4; l++) {
                        a[l] += p[0] * x[l];
                        b[l] += p[1] * y[l];
                    }
            });
            for (int l = 0; l < 4; l++) z[m.at(i, j + l)] = a[l] + b[l];
        }
}

// The gradients of U and M from that of z: a correlation with the flipped filters.
template <typename T>
void spatial_backward(const Vector<T> *grad_z, const Vector<T> *psi, const Maps &m, Vector<T> *grad_sums, Vector<T> *grad_peaks) {
    for (int64_t i = 0; i < m.rows; i++)
        for (int64_t j = 0; j < m.columns; j += 4) {
            Vector<T> a[4] = {}, b[4] = {};
            m.meet(i, [&](int64_t u, int64_t from) {
                const Vector<T> *p = psi + ((m.n - u) * m.n - 1) * 2, *x = grad_z + from * m.width + j;
                for (int64_t v = 0; v < m.n; v++, p -= 2, x += m.step)
                    for (int l = 0; l < 4; l++) {
                        a[l] += p[0] * x[l];
                        b[l] += p[1] * x[l];
                    }
            });
            for (int l = 0; l < 4 && j + l < m.columns; l++) {
                grad_sums[i * m.columns + j + l] += a[l];
                grad_peaks[i * m.columns + j + l] = b[l];
            }
        }
}

template <typename T>
void spatial_filter_gradient(const Vector<T> *sums, const Vector<T> *peaks, const Vector<T> *grad_z, const Maps &m,
                             Vector<T> *grad_psi) {
    for (int64_t u = 0; u < m.n; u++)
        for (int64_t first = 0; first < m.n; first += 4) {
            const int64_t some = std::min<int64_t>(4, m.n - first);
            Vector<T> a[4] = {}, b[4] = {};
            for (int64_t i = 0; i < m.rows; i++) {
                const int64_t from = i + u * m.step - m.reach;
                if (from < 0 || from >= m.rows) continue;
                const Vector<T> *g = grad_z + m.at(i, 0);
                const Vector<T> *x = sums + from * m.width + first * m.step;
                const Vector<T> *y = peaks + from * m.width + first * m.step;
                if (some == 4)
                    for (int64_t j = 0; j < m.columns; j++)
                        for (int l = 0; l < 4; l++) {
                            a[l] += g[j] * x[j + l * m.step];
                            b[l] += g[j] * y[j + l * m.step];
                        }
                else
                    for (int64_t j = 0; j < m.columns; j++)
                        for (int64_t l = 0; l < some; l++) {
                            a[l] += g[j] * x[j + l * m.step];
                            b[l] += g[j] * y[j + l * m.step];
                        }
            }
            for (int64_t l = 0; l < some; l++) {
                grad_psi[(u * m.n + first + l) * 2] += a[l];
                grad_psi[(u * m.n + first + l) * 2 + 1] += b[l];
            }
        }
}

// Sum and maximum over channels of J neighbors' responses, times attention, and the channel of the maximum.
template <int K, bool UNIT, int J, typename T>
inline void reduce_of(const T *x, int64_t size, const Vector<T> *w, const Vector<T> *alpha, const Shape &s, Vector<T> *sums,
                      Vector<T> *peaks, Int<T> *which) {
    Vector<T> r[J], total[J], best[J];
    Int<T> where[J];
    for (int j = 0; j < J; j++) {
        total[j] = Vector<T>{};
        best[j] = Vector<T>{} - std::numeric_limits<T>::infinity();
        where[j] = Int<T>{};
    }
    for (int64_t c = 0; c < s.channels; c++) {
        respond<K, UNIT, J, T>(x + c * s.poses * size, w + c * s.taps(), s, r);
        for (int j = 0; j < J; j++) {
            r[j] *= alpha[c];
            total[j] += r[j];
            const Int<T> more = r[j] > best[j];
            best[j] = more ? r[j] : best[j];
            where[j] = more ? all_lanes<T>(c) : where[j];
        }
    }
    for (int j = 0; j < J; j++) {
        sums[j] = total[j];
        peaks[j] = best[j];
        which[j] = where[j];
    }
}

template <int K, bool UNIT, typename T>
void attend(const T *x, const T *w, const T *alpha, const T *psi, T *y, T *u, T *m, int16_t *which, const Shape &s,
            int64_t threads) {
    const int64_t blocks = s.blocks<T>(), stride = UNIT ? 1 : s.stride, pixels = s.pixels();
    const int64_t size = s.padded_height() * s.padded_width();
    const Maps maps(s);
    const Vectors<T> filters = pack_filters(w, s), spatial = psi ? pack_spatial(psi, s) : Vectors<T>();
    share(s.batch * blocks, threads, [&](int64_t, int64_t begin, int64_t end) {
        std::vector<T> room(s.padding ? s.planes() * size : 0);
        Vectors<T> sums(maps.size()), peaks(maps.size()), z(maps.size()), total(pixels), weights(s.channels);
        std::vector<Int<T>> where(maps.size());
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / blocks, block = task % blocks, first = block * lanes<T>;
            const int64_t valid = std::min<int64_t>(lanes<T>, s.out - first);
            const T *own = x + b * s.planes() * s.height * s.width;
            if (s.padding && (task == begin || block == 0))
                for (int64_t plane = 0; plane < s.planes(); plane++)
                    pad(own + plane * s.height * s.width, &room[plane * size], s);
            const T *image = s.padding ? room.data() : own;
            std::fill(total.begin(), total.end(), Vector<T>{});
            for (int64_t p = 0; p < s.poses; p++) {
                const Vector<T> *taps = &filters[(p * blocks + block) * s.channels * s.taps()];
                for (int64_t c = 0; c < s.channels; c++)
                    weights[c] = alpha ? load(alpha + ((b * s.poses + p) * s.channels + c) * s.out + first, valid)
                                       : Vector<T>{} + T(1);
                for (int64_t i = 0; i < s.rows; i++) {
                    const T *row = image + p * size + i * stride * s.padded_width();
                    neighbors(s.columns, [&](auto count, int64_t j) {
                        const int64_t at = maps.at(i, j);
                        reduce_of<K, UNIT, decltype(count)::value, T>(row + j * stride, size, taps, weights.data(), s,
                                                                      &sums[at], &peaks[at], &where[at]);
                    });
                }
                if (psi)
                    spatial_logits<T>(sums.data(), peaks.data(), &spatial[(p * blocks + block) * s.n * s.n * 2], maps,
                                      z.data());
                for (int64_t i = 0; i < s.rows; i++)
                    for (int64_t j = 0; j < s.columns; j++) {
                        const int64_t at = maps.at(i, j), pixel = i * s.columns + j;
                        total[pixel] += psi ? sigmoid<T>(z[at]) * sums[at] : sums[at];
                        if (!u) continue;
                        const int64_t to = ((b * s.poses + p) * pixels + pixel) * s.out + first;
                        store(u + to, sums[at], valid);
                        store(m + to, peaks[at], valid);
                        for (int64_t l = 0; l < valid; l++) which[to + l] = static_cast<int16_t>(where[at][l]);
                    }
            }
            for (int64_t l = 0; l < valid; l++)
                for (int64_t pixel = 0; pixel < pixels; pixel++)
                    y[(b * s.out + first + l) * pixels + pixel] = total[pixel][l];
        }
    });
}

// The gradient with respect to the responses of one channel, zero around the map and between strided pixels, so that
// the gradient of the input is an ordinary correlation with it.
struct Spread {
    int64_t edge, width, height, stride;
    explicit Spread(const Shape &s)
        : edge(s.span() - 1), width(s.padded_width() + edge + 3), height(s.padded_height() + edge), stride(s.stride) {}
    int64_t size() const { return height * width; }
    int64_t at(int64_t i) const { return (edge + i * stride) * width + edge; }
};

// grad_filters(t) = sum over pixels of x(p + t) g(p)
template <int K, bool UNIT, typename T>
inline void correlate(const T *x, const Vector<T> *g, const Spread &to, const Shape &s, Vector<T> *grad_filters) {
    const int64_t k = K ? K : s.k, stride = UNIT ? 1 : s.stride, across = s.padded_width();
    constexpr int64_t most = K ? K : 4;
    for (int64_t u = 0; u < k; u++)
        for (int64_t first = 0; first < k; first += most) {
            const int64_t some = std::min(most, k - first);
            Vector<T> a[2][most] = {};
            for (int64_t i = 0; i < s.rows; i++) {
                const Vector<T> *from = g + to.at(i);
                const T *row = x + (i * stride + u * s.dilation) * across + first * s.dilation;
                int64_t j = 0;
                if (some == most) {
                    for (; j + 2 <= s.columns; j += 2)
                        for (int64_t v = 0; v < most; v++) {
                            a[0][v] += from[j * stride] * row[j * stride + v * s.dilation];
                            a[1][v] += from[(j + 1) * stride] * row[(j + 1) * stride + v * s.dilation];
                        }
                    for (; j < s.columns; j++)
                        for (int64_t v = 0; v < most; v++)
                            a[0][v] += from[j * stride] * row[j * stride + v * s.dilation];
                } else {
                    for (; j < s.columns; j++)
                        for (int64_t v = 0; v < some; v++)
                            a[0][v] += from[j * stride] * row[j * stride + v * s.dilation];
                }
            }
            for (int64_t v = 0; v < some; v++) grad_filters[u * k + first + v] = a[0][v] + a[1][v];
        }
}

// sums(q) += sum over taps of w(t) g(q - t), for the pixels q inside the border
template <int K, typename T>
inline void correlate_flipped(const Vector<T> *g, const Vector<T> *w, const Spread &from, const Shape &s, Vector<T> *sums,
                              int64_t across) {
    const int64_t k = K ? K : s.k;
    const auto some = [&](auto count, int64_t i, int64_t j) {
        constexpr int J = decltype(count)::value;
        Vector<T> a[J], *to = sums + i * across + j;
        for (int l = 0; l < J; l++) a[l] = to[l];
        const Vector<T> *corner = g + (i + s.padding + from.edge) * from.width + j + s.padding + from.edge;
        for (int64_t u = 0; u < k; u++)
            for (int64_t v = 0; v < k; v++) {
                const Vector<T> tap = w[u * k + v], *row = corner - u * s.dilation * from.width - v * s.dilation;
                for (int l = 0; l < J; l++) a[l] += tap * row[l];
            }
        for (int l = 0; l < J; l++) to[l] = a[l];
    };
    for (int64_t i = 0; i < s.height; i++) {
        int64_t j = 0;
        if constexpr (vector_bytes < 64)
            for (; j + 8 <= s.width; j += 8) some(std::integral_constant<int, 8>{}, i, j);
        for (; j < s.width; j += 4) some(std::integral_constant<int, 4>{}, i, j);
    }
}

// The gradients of U, M and psi from that of the output, for one pose of one image.
template <typename T>
void spatial_attention_backward(const T *u, const T *m, const Vector<T> *grad_y, const Vector<T> *psi, const Maps &maps,
                                const Shape &s, int64_t first, Vector<T> *room, Vector<T> *grad_sums, Vector<T> *grad_peaks,
                                Vector<T> *grad_psi) {
    const int64_t valid = std::min<int64_t>(lanes<T>, s.out - first), size = maps.size();
    Vector<T> *sums = room, *peaks = room + size, *z = room + 2 * size, *grad_z = room + 3 * size;
    for (int64_t i = 0; i < s.rows; i++)
        for (int64_t j = 0; j < s.columns; j++) {
            const int64_t from = (i * s.columns + j) * s.out + first;
            sums[maps.at(i, j)] = load(u + from, valid);
            peaks[maps.at(i, j)] = load(m + from, valid);
        }
    spatial_logits<T>(sums, peaks, psi, maps, z);
    for (int64_t i = 0; i < s.rows; i++)
        for (int64_t j = 0; j < s.columns; j++) {
            const int64_t at = maps.at(i, j), pixel = i * s.columns + j;
            const Vector<T> a = sigmoid<T>(z[at]);
            grad_sums[pixel] = grad_y[pixel] * a;
            grad_z[at] = grad_sums[pixel] * (T(1) - a) * sums[at];
        }
    spatial_backward<T>(grad_z, psi, maps, grad_sums, grad_peaks);
    spatial_filter_gradient<T>(sums, peaks, grad_z, maps, grad_psi);
}

template <int K, bool UNIT, typename T>
void attend_backward(const T *x, const T *w, const T *alpha, const T *psi, const T *u, const T *m, const int16_t *which,
                     const T *grad_y, T *grad_x, T *grad_w, T *grad_alpha, T *grad_psi, const Shape &s,
                     int64_t threads) {
    const int64_t blocks = s.blocks<T>(), pixels = s.pixels(), taps = s.taps(), area = s.n * s.n * 2;
    const int64_t size = s.padded_height() * s.padded_width(), across = (s.width + 3) / 4 * 4;
    const Maps maps(s);
    const Spread grid(s);
    const Vectors<T> filters = pack_filters(w, s), spatial = psi ? pack_spatial(psi, s) : Vectors<T>();
    // Sums over images, one for each thread.
    std::vector<Vectors<T>> grad_filters(threads), grad_spatial(threads);
    share(s.batch * s.poses, threads, [&](int64_t slot, int64_t begin, int64_t end) {
        grad_filters[slot].resize(filters.size());
        grad_spatial[slot].resize(spatial.size());
        std::vector<T> room(s.padding ? size : 0);
        Vectors<T> grad_out(blocks * pixels), grad_sums(blocks * pixels), grad_peaks(psi ? blocks * pixels : 0);
        std::vector<Int<T>> where(psi ? blocks * pixels : 0);
        Vectors<T> scratch(psi ? 4 * maps.size() : 0), g(grid.size()), sums(s.height * across), q(taps), scaled(taps);
        for (int64_t task = begin; task < end; task++) {
            const int64_t b = task / s.poses, p = task % s.poses;
            T *values = reinterpret_cast<T *>(grad_out.data());
            for (int64_t o = 0; o < s.out; o++)
                for (int64_t pixel = 0; pixel < pixels; pixel++)
                    values[(o / lanes<T> * pixels + pixel) * lanes<T> + o % lanes<T>] = grad_y[(b * s.out + o) * pixels + pixel];
            for (int64_t block = 0; block < blocks && psi; block++) {
                const int64_t first = block * lanes<T>, valid = std::min<int64_t>(lanes<T>, s.out - first);
                const int64_t from = task * pixels * s.out, own = p * blocks + block;
                spatial_attention_backward<T>(u + from, m + from, &grad_out[block * pixels], &spatial[own * area], maps,
                                              s, first,
                               scratch.data(), &grad_sums[block * pixels], &grad_peaks[block * pixels],
                               &grad_spatial[slot][own * area]);
                for (int64_t pixel = 0; pixel < pixels; pixel++)
                    for (int64_t l = 0; l < valid; l++)
                        where[block * pixels + pixel][l] = which[from + pixel * s.out + first + l];
            }
            const Vector<T> *grad_total = psi ? grad_sums.data() : grad_out.data();
            for (int64_t c = 0; c < s.channels; c++) {
                const int64_t plane = b * s.planes() + c * s.poses + p;
                const T *from = pad(x + plane * s.height * s.width, room.data(), s);
                std::fill(sums.begin(), sums.end(), Vector<T>{});
                for (int64_t block = 0; block < blocks; block++) {
                    const int64_t own = ((p * blocks + block) * s.channels + c) * taps, first = block * lanes<T>;
                    const int64_t valid = std::min<int64_t>(lanes<T>, s.out - first);
                    const int64_t at = ((b * s.poses + p) * s.channels + c) * s.out + first;
                    for (int64_t i = 0; i < s.rows; i++)
                        for (int64_t j = 0; j < s.columns; j++) {
                            const int64_t pixel = block * pixels + i * s.columns + j;
                            Vector<T> grad_response = grad_total[pixel];
                            if (psi) grad_response += where[pixel] == all_lanes<T>(c) ? grad_peaks[pixel] : Vector<T>{};
                            g[grid.at(i) + j * grid.stride] = grad_response;
                        }
                    correlate<K, UNIT, T>(from, g.data(), grid, s, q.data());
                    const Vector<T> weight = alpha ? load(alpha + at, valid) : Vector<T>{} + T(1);
                    Vector<T> of_alpha = {};
                    for (int64_t t = 0; t < taps; t++) {
                        of_alpha += filters[own + t] * q[t];
                        grad_filters[slot][own + t] += weight * q[t];
                        scaled[t] = weight * filters[own + t];
                    }
                    if (grad_alpha) store(grad_alpha + at, of_alpha, valid);
                    correlate_flipped<K, T>(g.data(), scaled.data(), grid, s, sums.data(), across);
                }
                for (int64_t i = 0; i < s.height; i++)
                    for (int64_t j = 0; j < s.width; j++)
                        grad_x[(plane * s.height + i) * s.width + j] = lane_sum<T>(&sums[i * across + j]);
            }
        }
    });
    for (int64_t slot = 1; slot < threads; slot++) {
        for (size_t i = 0; i < grad_filters[slot].size(); i++) grad_filters[0][i] += grad_filters[slot][i];
        for (size_t i = 0; i < grad_spatial[slot].size(); i++) grad_spatial[0][i] += grad_spatial[slot][i];
    }
    const T *from = reinterpret_cast<const T *>(grad_filters[0].data());
    for (int64_t o = 0; o < s.out; o++)
        for (int64_t c = 0; c < s.channels; c++)
            for (int64_t p = 0; p < s.poses; p++)
                for (int64_t t = 0; t < taps; t++)
                    *grad_w++ = from[(((p * blocks + o / lanes<T>)*s.channels + c) * taps + t) * lanes<T> + o % lanes<T>];
    if (!psi) return;
    from = reinterpret_cast<const T *>(grad_spatial[0].data());
    for (int64_t o = 0; o < s.out; o++)
        for (int64_t statistic = 0; statistic < 2; statistic++)
            for (int64_t p = 0; p < s.poses; p++)
                for (int64_t t = 0; t < s.n * s.n; t++) {
                    const T grad = from[((p * blocks + o / lanes<T>)*area + t * 2 + statistic) * lanes<T> + o % lanes<T>];
                    *grad_psi++ = statistic ? grad : grad / s.channels;
                }
}

// Calls with the side of the filter and the unit stride as constants, for the sizes that networks use.
template <typename F> void with_constants(const Shape &s, F call) {
    if (s.stride != 1)
        call(std::integral_constant<int, 0>(), std::false_type());
    else if (s.k == 3)
        call(std::integral_constant<int, 3>(), std::true_type());
    else if (s.k == 1)
        call(std::integral_constant<int, 1>(), std::true_type());
    else
        call(std::integral_constant<int, 0>(), std::true_type());
}

}  // namespace

#define SIZES                                                                                                          \
    int64_t batch, int64_t channels, int64_t poses, int64_t out, int64_t k, int64_t height, int64_t width,             \
        int64_t rows, int64_t columns, int64_t stride, int64_t padding, int64_t dilation, int64_t n,                   \
        int64_t attention_dilation, int64_t threads
#define SHAPE                                                                                                          \
    const Shape s{batch, channels, poses, out, k, height, width, rows, columns, stride, padding, dilation, n,          \
                  attention_dilation}
extern "C" void response_peak(const Scalar *x, const Scalar *w, Scalar *peaks, int32_t *places, SIZES) {
    SHAPE;
    with_constants(s, [&](auto side, auto unit) { peak<side(), unit()>(x, w, peaks, places, s, threads); });
}
extern "C" void response_peak_backward(const Scalar *x, const Scalar *w, const int32_t *places, const Scalar *g,
        Scalar *grad_x, Scalar *grad_w, SIZES) {
    SHAPE;
    peak_backward(x, w, places, g, grad_x, grad_w, s, threads);
}
extern "C" void response_sum(const Scalar *x, const Scalar *w, const Scalar *alpha, const Scalar *psi, Scalar *y,
        Scalar *u, Scalar *m, int16_t *which, SIZES) {
    SHAPE;
    with_constants(s, [&](auto side, auto unit) {
        attend<side(), unit()>(x, w, alpha, psi, y, u, m, which, s, threads);
    });
}
extern "C" void response_sum_backward(const Scalar *x, const Scalar *w, const Scalar *alpha, const Scalar *psi,
        const Scalar *u, const Scalar *m, const int16_t *which, const Scalar *g, Scalar *grad_x, Scalar *grad_w,
        Scalar *grad_alpha, Scalar *grad_psi, SIZES) {
    SHAPE;
    with_constants(s, [&](auto side, auto unit) {
        attend_backward<side(), unit()>(x, w, alpha, psi, u, m, which, g, grad_x, grad_w, grad_alpha,
            grad_psi, s, threads);
    });
}
