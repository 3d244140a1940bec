// Batch normalization of fields whose planes share statistics, with the sum of a residual and the ReLU behind it.
//
// Memory is read in one of two ways. Planes first: every plane is a run of pixels, with one factor. Planes last: every
// pixel is a row of all planes; a few pixels make one longer row of whole vectors, and each place of that row (a lane)
// has a factor of its own. Sums are taken in blocks that stay in the cache: first the mean of a block, then the squares
// around it, and blocks are joined in double precision, so that a large mean costs no digits of the variance.
#include <numeric>
#include <vector>

#include "simd.h"

namespace {

constexpr int64_t block_numbers = 4096;  // numbers of a block: with its residual and gradient it stays in the L1 cache
constexpr int group = 4;                 // vectors that are summed side by side, in registers

template <typename V>
inline V positive(V value) {  // not-a-number passes, as it does through torch's
    return value < 0 ? V() : value;
}

// Calls f(N, i) for vectors of N numbers at i, and for the numbers that are left one by one.
template <typename T, typename F>
inline void each(int64_t from, int64_t to, F f) {
    constexpr int N = lanes<T>;
    int64_t i = from;
    for (; i + N <= to; i += N) f(std::integral_constant<int, N>{}, i);
    for (; i < to; i++) f(std::integral_constant<int, 1>{}, i);
}

inline int64_t team() {
#ifdef _OPENMP
    return omp_get_num_threads();
#else
    return 1;
#endif
}

// Mean and sum of squares around it of so many numbers; joined as by Chan et al. (1983).
struct Moments {
    double count = 0, mean = 0, squares = 0;

    void join(double other_count, double other_mean, double other_squares) {
        if (other_count == 0) return;
        const double total = count + other_count, apart = other_mean - mean;
        mean += apart * (other_count / total);
        squares += other_squares + apart * apart * (count * (other_count / total));
        count = total;
    }
};

struct Shape {
    int64_t outer, fields, order, inner, last, poses_fastest;

    int64_t planes() const { return fields * order; }
    int64_t numbers() const { return outer * planes() * inner; }
    double count() const { return static_cast<double>(outer) * order * inner; }
};

// How the numbers are cut. Planes first: rows are planes of ``inner`` numbers each. Planes last: rows are ``width``
// numbers, several pixels, and the pixels that fill no row are left behind them.
template <typename T>
struct Cut {
    Shape shape;
    int64_t rows, width, rest;

    explicit Cut(const Shape &shape) : shape(shape) {
        const int64_t planes = shape.planes();
        if (!shape.last) {
            rows = shape.outer * planes, width = shape.inner, rest = 0;
            return;
        }
        int64_t pixels = lanes<T> / std::gcd<int64_t>(planes, lanes<T>);
        while (pixels * planes < group * lanes<T>) pixels *= 2;
        if (pixels * planes > block_numbers / 2 || pixels > shape.outer * shape.inner) pixels = 1;
        width = pixels * planes, rows = shape.outer * shape.inner / pixels;
        rest = shape.outer * shape.inner - rows * pixels;
    }

    int64_t block() const { return std::max<int64_t>(64, block_numbers / width); }  // rows of a block, planes last

    // Calls f(first, rows, width) for a thread's blocks of rows, the last ones first where ``back``: they are still in
    // the cache. Planes first, a block is a part of one plane.
    template <typename F>
    void blocks(bool back, F f) const {
        const int64_t from = rows * thread() / team(), to = rows * (thread() + 1) / team();
        const int64_t step = shape.last ? block() : 1, count = (to - from + step - 1) / step;
        if (shape.last && rest && thread() == team() - 1 && back) f(rows * width, rest, shape.planes());
        for (int64_t i = 0; i < count; i++) {
            const int64_t row = from + (back ? count - 1 - i : i) * step;
            f(row * width, std::min(step, to - row), width);
        }
        if (shape.last && rest && thread() == team() - 1 && !back) f(rows * width, rest, shape.planes());
    }
    int64_t plane(int64_t first) const { return first / width % shape.planes(); }  // planes first
};

// One value a lane, from one a field.
template <typename A, typename F>
std::vector<A> spread(const Shape &shape, int64_t width, F value) {
    std::vector<A> out(width);
    const int64_t planes = shape.planes(), first = std::min(planes, width);
    const bool fields_fastest = shape.last && !shape.poses_fastest;
    for (int64_t c = 0; c < shape.fields; c++) {
        const A one = static_cast<A>(value(c));
        for (int64_t h = 0; h < shape.order; h++) out[fields_fastest ? h * shape.fields + c : c * shape.order + h] = one;
    }
    for (int64_t i = first; i < width; i += first)
        std::copy_n(out.begin(), std::min(first, width - i), out.begin() + i);
    return out;
}

// Calls body(part, i, lane) for all vectors of a block: i is where the numbers are, lane which factors are theirs.
template <typename T, typename F>
inline void over(int64_t first, int64_t rows, int64_t width, F body) {
    for (int64_t row = 0; row < rows; row++)
        each<T>(0, width, [&](auto n, int64_t lane) { body(n, first + row * width + lane, lane); });
}

// Sums K values a number over the rows of a block, lane by lane, and gives them to take(part, lane, sums).
template <int K, typename T, typename F, typename G>
inline void lane_sums(int64_t first, int64_t rows, int64_t width, F values, G take) {
    using A = Computed<T>;
    constexpr int N = lanes<T>;
    const auto some = [&](auto count, int64_t lane) {
        Vector<A, N> sums[count][K] = {};
        for (int64_t row = 0; row < rows; row++)
            for (int v = 0; v < count; v++) {
                const int64_t at = lane + v * N;
                const auto value = values(std::integral_constant<int, N>{}, first + row * width + at, at);
                for (int k = 0; k < K; k++) sums[v][k] += value[k];
            }
        for (int v = 0; v < count; v++) take(std::integral_constant<int, N>{}, lane + v * N, sums[v]);
    };
    int64_t lane = 0;
    for (; lane + group * N <= width; lane += group * N) some(std::integral_constant<int, group>{}, lane);
    for (; lane + N <= width; lane += N) some(std::integral_constant<int, 1>{}, lane);
    for (; lane < width; lane++) {
        A sums[K] = {};
        for (int64_t row = 0; row < rows; row++) {
            const auto value = values(std::integral_constant<int, 1>{}, first + row * width + lane, lane);
            for (int k = 0; k < K; k++) sums[k] += value[k];
        }
        take(std::integral_constant<int, 1>{}, lane, sums);
    }
}

template <typename V, int K>
struct Values {
    V of[K];
    V operator[](int k) const { return of[k]; }
};

// Sums K values a number over a run of numbers with one factor.
template <int K, typename T, typename F>
inline void run_sums(int64_t first, int64_t numbers, F values, Computed<T> *sums) {
    using A = Computed<T>;
    constexpr int N = lanes<T>, U = 4;
    Vector<A, N> parts[K][U] = {};
    int64_t i = 0;
    for (; i + U * N <= numbers; i += U * N)
        for (int u = 0; u < U; u++) {
            const auto value = values(std::integral_constant<int, N>{}, first + i + u * N);
            for (int k = 0; k < K; k++) parts[k][u] += value[k];
        }
    for (; i + N <= numbers; i += N) {
        const auto value = values(std::integral_constant<int, N>{}, first + i);
        for (int k = 0; k < K; k++) parts[k][0] += value[k];
    }
    for (int k = 0; k < K; k++) {
        const auto all = (parts[k][0] + parts[k][1]) + (parts[k][2] + parts[k][3]);
        sums[k] = lane_sum<A>(&all);
    }
    for (; i < numbers; i++) {
        const auto value = values(std::integral_constant<int, 1>{}, first + i);
        for (int k = 0; k < K; k++) sums[k] += value[k];
    }
}

// The moments of a thread's numbers, one a place: a plane, or a lane of as many rows as all other lanes. The rows that
// are left over have places of their own behind the others.
struct Found {
    std::vector<double> counts, means, squares;

    void resize(int64_t places) {
        for (auto *of : {&counts, &means, &squares}) of->assign(places, 0.0);
    }
    Moments at(int64_t place) const { return {counts[place], means[place], squares[place]}; }
};

template <typename T>
void moments(const Cut<T> &cut, const T *x, Found &found) {
    using A = Computed<T>;
    if (!cut.shape.last) {
        cut.blocks(false, [&](int64_t first, int64_t, int64_t width) {
            const int64_t plane = cut.plane(first);
            Moments all = found.at(plane);
            for (int64_t i = 0; i < width; i += block_numbers) {
                const int64_t numbers = std::min(block_numbers, width - i);
                A sum, both[2];
                run_sums<1, T>(first + i, numbers, [=](auto n, int64_t at) {
                    return Values<Vector<A, n>, 1>{load<n>(x + at)};
                }, &sum);
                const A mean = sum / static_cast<A>(numbers);
                // What the mean lost to rounding is taken back: the mean of the differences is added to it.
                run_sums<2, T>(first + i, numbers, [=](auto n, int64_t at) {
                    const auto apart = load<n>(x + at) - mean;
                    return Values<Vector<A, n>, 2>{apart, apart * apart};
                }, both);
                const double left = static_cast<double>(both[0]) / numbers;
                all.join(numbers, mean + left, std::max(0.0, both[1] - numbers * left * left));
            }
            found.counts[plane] = all.count, found.means[plane] = all.mean, found.squares[plane] = all.squares;
        });
        return;
    }
    std::vector<A> mean(cut.width), left(cut.width), squares(cut.width);
    cut.blocks(false, [&](int64_t first, int64_t rows, int64_t width) {
        const A share = 1 / static_cast<A>(rows);
        lane_sums<1, T>(first, rows, width, [&](auto n, int64_t at, int64_t) {
            return Values<Vector<A, n>, 1>{load<n>(x + at)};
        }, [&](auto n, int64_t lane, const auto *sums) { store<n>(&mean[lane], sums[0] * share); });
        lane_sums<2, T>(first, rows, width, [&](auto n, int64_t at, int64_t lane) {
            const auto apart = load<n>(x + at) - load<n>(&mean[lane]);
            return Values<Vector<A, n>, 2>{apart, apart * apart};
        }, [&](auto n, int64_t lane, const auto *sums) {
            store<n>(&left[lane], sums[0] * share), store<n>(&squares[lane], sums[1]);
        });
        const int64_t place = first == cut.rows * cut.width && cut.rest ? cut.width : 0;
        double *const counts = &found.counts[place], *const means = &found.means[place];
        double *const sums = &found.squares[place];
        const double before = counts[0], part = rows / (before + rows), both = before * part;
        for (int64_t lane = 0; lane < width; lane++) {
            const double more = left[lane], apart = mean[lane] + more - means[lane];
            means[lane] += apart * part;
            sums[lane] += std::max(0.0, squares[lane] - rows * more * more) + apart * apart * both;
            counts[lane] = before + rows;
        }
    });
}

inline int64_t threads_for(const Shape &shape, int64_t threads) {
    return std::max<int64_t>(1, std::min(threads, shape.numbers() / 16384));
}

template <typename T, typename A>
void forward(const T *x, const T *residual, T *y, const A *weight, const A *bias, const A *running_mean,
             const A *running_var, A *stats, const Shape &shape, bool relu, double eps, int64_t threads) {
    const Cut<T> cut(shape);
    const int64_t fields = shape.fields, planes = shape.planes();
    const int64_t width = shape.last ? cut.width : planes, places = width + (cut.rest ? planes : 0);
    threads = threads_for(shape, threads);
    std::vector<Found> found(running_mean ? 0 : threads);
    const auto field = spread<int32_t>(shape, planes, [](int64_t c) { return c; });
    std::vector<A> mean, scale, shift;

    // Mean, 1 / standard deviation and the unbiased variance of each field.
    const auto statistics = [&]() {
        std::vector<Moments> all(fields);
        const auto places_of = [&](auto take) {
            for (const auto &of : found)
                for (int64_t i = 0, plane = 0; i < static_cast<int64_t>(of.counts.size()); i++) {
                    take(all[field[plane]], of.counts[i], of.means[i], of.squares[i]);
                    if (++plane == planes) plane = 0;  // a row is whole pixels
                }
        };
        places_of([](Moments &sum, double count, double mean, double) { sum.count += count, sum.mean += count * mean; });
        for (auto &of : all) of.mean /= of.count;
        places_of([](Moments &sum, double count, double mean, double squares) {
            sum.squares += squares + count * (mean - sum.mean) * (mean - sum.mean);
        });
        for (int64_t c = 0; c < fields; c++) {
            stats[c] = running_mean ? running_mean[c] : static_cast<A>(all[c].mean);
            const double variance = running_mean ? running_var[c] : all[c].squares / all[c].count;
            stats[fields + c] = static_cast<A>(1 / std::sqrt(variance + eps));
            stats[2 * fields + c] = static_cast<A>(running_mean ? variance : all[c].squares / (all[c].count - 1));
        }
        mean = spread<A>(shape, width, [&](int64_t c) { return stats[c]; });
        scale = spread<A>(shape, width, [&](int64_t c) { return (weight ? weight[c] : 1) * stats[fields + c]; });
        shift = spread<A>(shape, width, [&](int64_t c) { return bias ? bias[c] : 0; });
    };
    const auto apply = [&](auto last, auto with_residual, auto with_relu) {
        cut.blocks(!running_mean, [&](int64_t first, int64_t rows, int64_t width) {
            // Planes first, the factors are kept in registers; they could change with y for all that a compiler knows.
            const int64_t plane = last ? 0 : cut.plane(first);
            const A own_mean = mean[plane], own_scale = scale[plane], own_shift = shift[plane];
            const A *means = mean.data(), *scales = scale.data(), *shifts = shift.data();
            over<T>(first, rows, width, [=](auto n, int64_t at, int64_t lane) {
                Vector<A, n> value = load<n>(x + at);
                if constexpr (last) {
                    value = (value - load<n>(means + lane)) * load<n>(scales + lane) + load<n>(shifts + lane);
                } else {
                    value = (value - own_mean) * own_scale + own_shift;
                }
                if constexpr (with_residual) value += load<n>(residual + at);
                if constexpr (with_relu) value = positive(value);
                store<n>(y + at, value);
            });
        });
    };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const FlushSubnormals flush;
        if (!running_mean) {
            found[thread()].resize(places);
            moments<T>(cut, x, found[thread()]);
        }
#pragma omp barrier
#pragma omp single
        statistics();
        const std::true_type yes;
        const std::false_type no;
        const auto choose = [&](auto last) {
            if (residual) {
                relu ? apply(last, yes, yes) : apply(last, yes, no);
            } else {
                relu ? apply(last, no, yes) : apply(last, no, no);
            }
        };
        shape.last ? choose(yes) : choose(no);
    }
}

// With g the gradient behind sum and ReLU, N numbers a field and x̂ = (x − mean) / deviation:
// dx = γ / deviation · (g − Σ g / N − x̂ · Σ g x̂ / N), without the sums where the statistics are running ones.
template <typename T, typename A>
void backward(const T *grad, const T *x, const T *y, T *grad_x, T *grad_residual, const A *weight, const A *stats,
              A *grad_weight, A *grad_bias, const Shape &shape, bool training, int64_t threads) {
    const Cut<T> cut(shape);
    const int64_t fields = shape.fields, planes = shape.planes(), width = shape.last ? cut.width : planes;
    threads = threads_for(shape, threads);
    const auto field = spread<int32_t>(shape, planes, [](int64_t c) { return c; });
    struct Sums {
        double grad = 0, product = 0;
    };
    std::vector<std::vector<Sums>> found(threads);
    const auto mean = spread<A>(shape, width, [&](int64_t c) { return stats[c]; });
    std::vector<A> scale, slope, offset;

    const auto sums = [&](auto with_relu, auto keeps) {
        auto &mine = found[thread()];
        mine.resize(width);
        const auto values = [=](auto n, int64_t at, auto from) {
            Vector<A, n> g = load<n>(grad + at);
            if constexpr (with_relu) g = load<n>(y + at) > 0 ? g : Vector<A, n>{};
            if constexpr (keeps) store<n>(grad_residual + at, g);
            return Values<Vector<A, n>, 2>{g, g * (load<n>(x + at) - from)};
        };
        cut.blocks(false, [&](int64_t first, int64_t rows, int64_t width) {
            if (shape.last) {
                lane_sums<2, T>(first, rows, width, [&](auto n, int64_t at, int64_t lane) {
                    return values(n, at, load<n>(&mean[lane]));
                }, [&](auto n, int64_t lane, const auto *both) {
                    A g[n], product[n];
                    store<n>(g, both[0]), store<n>(product, both[1]);
                    for (int i = 0; i < n; i++) mine[lane + i].grad += g[i], mine[lane + i].product += product[i];
                });
                return;
            }
            const int64_t plane = cut.plane(first);
            const A own_mean = mean[plane];
            for (int64_t i = 0; i < width; i += block_numbers) {
                A both[2];
                run_sums<2, T>(first + i, std::min(block_numbers, width - i), [=](auto n, int64_t at) {
                    return values(n, at, Vector<A, n>{} + own_mean);
                }, both);
                mine[plane].grad += both[0], mine[plane].product += both[1];
            }
        });
    };
    const auto factors = [&]() {
        std::vector<Sums> all(fields);
        for (const auto &of : found)
            for (int64_t i = 0, plane = 0; i < static_cast<int64_t>(of.size()); i++) {
                auto &sum = all[field[plane]];
                sum.grad += of[i].grad, sum.product += of[i].product;
                if (++plane == planes) plane = 0;
            }
        const auto inverse = [&](int64_t c) { return static_cast<double>(stats[fields + c]); };
        const auto factor = [&](int64_t c) { return (weight ? weight[c] : 1) * inverse(c); };
        for (int64_t c = 0; c < fields; c++) {
            if (grad_weight) grad_weight[c] = static_cast<A>(all[c].product * inverse(c));
            if (grad_bias) grad_bias[c] = static_cast<A>(all[c].grad);
        }
        const double share = 1 / shape.count();
        scale = spread<A>(shape, width, factor);
        slope = spread<A>(shape, width, [&](int64_t c) {
            return -factor(c) * inverse(c) * inverse(c) * all[c].product * share;
        });
        offset = spread<A>(shape, width, [&](int64_t c) { return -factor(c) * all[c].grad * share; });
    };
    // With running statistics the sums play no part, whatever they are: one infinite image leaves the others alone.
    const auto apply = [&](auto last, auto with_relu) {
        // The gradient of the residual is the one behind the ReLU, and stands there from the first pass.
        const T *from = grad_residual ? grad_residual : grad;
        cut.blocks(true, [&](int64_t first, int64_t rows, int64_t width) {
            const int64_t plane = last ? 0 : cut.plane(first);
            const A own_mean = mean[plane], own_scale = scale[plane];
            const A own_slope = slope[plane], own_offset = offset[plane];
            const A *means = mean.data(), *scales = scale.data(), *slopes = slope.data(), *offsets = offset.data();
            over<T>(first, rows, width, [=](auto n, int64_t at, int64_t lane) {
                Vector<A, n> g = load<n>(from + at);
                if constexpr (with_relu) g = load<n>(y + at) > 0 ? g : Vector<A, n>{};
                if constexpr (last) {
                    g = g * load<n>(scales + lane);
                    if (training)
                        g = g + ((Vector<A, n>(load<n>(x + at)) - load<n>(means + lane)) * load<n>(slopes + lane) +
                                 load<n>(offsets + lane));
                } else {
                    g = g * own_scale;
                    if (training) g = g + ((Vector<A, n>(load<n>(x + at)) - own_mean) * own_slope + own_offset);
                }
                store<n>(grad_x + at, g);
            });
        });
    };
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        const FlushSubnormals flush;
        const std::true_type yes;
        const std::false_type no;
        if (y) {
            grad_residual ? sums(yes, yes) : sums(yes, no);
        } else {
            sums(no, no);
        }
#pragma omp barrier
#pragma omp single
        factors();
        const auto choose = [&](auto last) { y && !grad_residual ? apply(last, yes) : apply(last, no); };
        shape.last ? choose(yes) : choose(no);
    }
}

}  // namespace

extern "C" void batch_norm(const Scalar *x, const Scalar *residual, Scalar *y, const Real *weight, const Real *bias,
        const Real *running_mean, const Real *running_var, Real *stats, int64_t outer, int64_t fields, int64_t order,
        int64_t inner, int64_t last, int64_t poses_fastest, int64_t relu, double eps, int64_t threads) {
    forward<Scalar, Real>(x, residual, y, weight, bias, running_mean, running_var, stats,
                  {outer, fields, order, inner, last, poses_fastest}, relu, eps, threads);
}
extern "C" void batch_norm_backward(const Scalar *grad, const Scalar *x, const Scalar *y, Scalar *grad_x,
        Scalar *grad_residual, const Real *weight, const Real *stats, Real *grad_weight, Real *grad_bias, int64_t outer,
        int64_t fields, int64_t order, int64_t inner, int64_t last, int64_t poses_fastest, int64_t training,
        int64_t threads) {
    backward<Scalar, Real>(grad, x, y, grad_x, grad_residual, weight, stats, grad_weight, grad_bias,
                   {outer, fields, order, inner, last, poses_fastest}, training, threads);
}
