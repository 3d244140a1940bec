// Group self-attention in local windows. One thread owns one head of one image; a vector holds neighboring pixels.
//
// Rows have a pitch of width + reach, so that the padding right of a row is that left of the next one: every neighbor
// of a run of pixels is the same run, shifted. Attention at a pixel is a product of small matrices over poses,
// channels and neighbors, one in each lane.
//
// Scores are shared(g, m, j) + placed(v, g, j). With top(g, j) = max_m shared and E = exp(shared - top), the
// probabilities are a(v, g, j) E(g, m, j), a = exp(placed + top - max_j) / Z. Neither factor can overflow, and no
// logarithm is needed. The softmax of each g has its own Z, so weights are summed over g only when all Z are known.
//
// The sum over g and m of a E value is taken over g first, which is |H|^3 products for each neighbor, or over m first
// where there are more poses than channels: then nothing grows faster than |H|^2.
#include <new>

#include "simd.h"

namespace {

// A matrix for each lane: entry (r, k) starts at data + r * row + k * inner, and that of neighbor j at jump more.
template <class T> struct Left {
    const T *data;
    int64_t row, inner, jump;
};
template <class T> struct Right {
    const T *data;
    int64_t column, inner;
    const int64_t *jumps;  // one for each neighbor, null where all are
    int64_t jump = 0;      // this one
};
template <class T> struct Out {
    T *data;
    int64_t row, column;
    bool add;
};

// out(r, c) = sum over j and k of left(j, r, k) right(j, k, c), with R x C sums in registers, which begin with what is
// there if Add. The numbers on the left are the same in all lanes if they are Uniform. Unrolled before GCC assigns
// registers; otherwise the sums begin and end on the stack.
template <class T, bool Uniform, bool Add, int R, int C>
void block(const Left<T> &left, const Right<T> &right, const Out<T> &out, int64_t r0, int64_t c0, int64_t neighbors,
           int64_t inner) {
    const int64_t row = left.row, column = right.column, left_step = left.inner, right_step = right.inner;
    const T *a0 = left.data + r0 * row, *b0 = right.data + c0 * column;
    T *to = out.data + r0 * out.row + c0 * out.column;
    Vector<T> sums[R][C];
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            if constexpr (Add)
                sums[r][c] = load(to + r * out.row + c * out.column);
            else
                sums[r][c] = Vector<T>{};
        }
    for (int64_t j = 0; j < neighbors; j++) {
        const T *a = a0 + j * left.jump, *b = b0 + (right.jumps ? right.jumps[j] : j * right.jump);
        for (int64_t k = 0; k < inner; k++, a += left_step, b += right_step) {
            Vector<T> columns[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) columns[c] = load(b + c * column);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                if constexpr (Uniform) {
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) sums[r][c] += columns[c] * a[r * row];
                } else {
                    Vector<T> factor = load(a + r * row);
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) sums[r][c] += columns[c] * factor;
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store<T>(to + r * out.row + c * out.column, sums[r][c]);
}

template <class T, bool Uniform, bool Add> struct Blocks {
    using Block = void (*)(const Left<T> &, const Right<T> &, const Out<T> &, int64_t, int64_t, int64_t, int64_t);
    template <int R, int C> static constexpr Block of = block<T, Uniform, Add, R, C>;
    static constexpr Block table[4][4] = {{of<1, 1>, of<1, 2>, of<1, 3>, of<1, 4>},
                                          {of<2, 1>, of<2, 2>, of<2, 3>, of<2, 4>},
                                          {of<3, 1>, of<3, 2>, of<3, 3>, of<3, 4>},
                                          {of<4, 1>, of<4, 2>, of<4, 3>, of<4, 4>}};
};

template <class T, bool Uniform = false>
inline void product(int64_t rows, int64_t columns, const Left<T> &left, const Right<T> &right, const Out<T> &out,
                    int64_t neighbors, int64_t inner) {
    const auto &blocks = out.add ? Blocks<T, Uniform, true>::table : Blocks<T, Uniform, false>::table;
    for (int64_t c = 0; c < columns; c += 4)
        for (int64_t r = 0; r < rows; r += 4)
            blocks[std::min<int64_t>(rows - r, 4) - 1][std::min<int64_t>(columns - c, 4) - 1](left, right, out, r, c,
                                                                                             neighbors, inner);
}

struct Sizes {
    int64_t batch, heads, channels, poses, outputs, coded, posed, height, width, rows, columns;
    double scale, dropout;
    int64_t pixels() const { return height * width; }
    int64_t neighbors() const { return rows * columns; }
    int64_t reach_rows() const { return rows / 2; }
    int64_t reach_columns() const { return columns / 2; }
    int64_t pitch() const { return width + reach_columns(); }
    int64_t extent() const { return (height - 1) * pitch() + width; }  // of queries, from the first to the last
};

inline uint32_t hash(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Scratch for one thread, and what forward and backward share: probabilities of a run of pixels.
template <class T> struct Worker {
    static constexpr int L = lanes<T>;
    static constexpr int64_t most = 4;  // output poses at a time
    const Sizes n;
    const T *position, *pose;
    uint32_t seed[2];
    int64_t plane, room;
    int64_t first, count;  // the neighbors of this run: those in rows that it can see
    int64_t source[L];     // the pixel of each lane; any one where the lane is padding
    bool real[L];
    bool poses_first;
    T *memory, *codes, *outside, *keys, *values, *query, *bias, *weights, *kept, *top, *total;
    T *placed, *highest, *mass, *mixture, *staged;
    T *grad_keys, *grad_values, *grad_out, *grad_query, *grad_weights, *grad_mixture, *grad_placed, *sum_delta, *delta;
    T *grad_bias, *grad_position, *grad_pose;
    int64_t *shifts, *jumps;

    Worker(const Sizes &sizes, const T *position, const T *pose, const int64_t *seeds, bool grad)
        : n(sizes), position(position), pose(pose) {
        seed[0] = seeds ? static_cast<uint32_t>(*seeds) : 0;
        seed[1] = seeds ? static_cast<uint32_t>(static_cast<uint64_t>(*seeds) >> 32) : 0;
        int64_t d = n.channels, G = n.poses, J = n.neighbors(), GG = G * G, v = std::min(most, n.outputs);
        int64_t runs = (n.extent() + L - 1) / L * L;
        plane = runs + 2 * n.reach_rows() * n.pitch() + 2 * n.reach_columns();
        poses_first = G > d;
        plane = ((plane + L - 1) / L | 1) * L;  // odd, so that planes do not share cache sets
        int64_t run_rows = n.height - 1 + (L + n.pitch() - 1) / n.pitch();
        room = std::min(J, std::min(n.rows, run_rows + 2) * n.columns);
        for (bool measure : {true, false}) {
            int64_t used = 0;
            auto take = [&](T *&part, int64_t size) {
                part = measure ? nullptr : memory + used;
                used += (size + L - 1) / L * L;
            };
            take(codes, n.coded * n.outputs * J);
            take(outside, plane);
            take(keys, d * G * plane);
            take(values, d * G * plane);
            take(query, d * G * L);
            take(bias, GG * L);
            take(weights, room * GG * L);
            take(kept, n.dropout > 0 ? room * GG * L : 0);
            take(top, room * G * L);
            take(total, room * G * L);
            take(placed, room * v * G * L);
            take(highest, v * G * L);
            take(mass, v * G * L);
            take(mixture, poses_first ? room * d * G * L : (grad ? 1 : room) * v * G * L);
            take(staged, d * std::max(v, G) * L);
            if (grad) {
                take(grad_keys, d * G * plane);
                take(grad_values, d * G * plane);
                take(grad_out, d * n.outputs * L);
                take(grad_query, d * G * L);
                take(grad_weights, room * GG * L);
                take(grad_mixture, poses_first ? room * d * G * L : v * G * L);
                take(grad_placed, room * v * G * L);
                take(sum_delta, room * G * L);
                take(delta, v * G * L);
                take(grad_bias, GG * L);
                take(grad_position, J * n.coded * n.outputs * L);
                take(grad_pose, n.posed * GG * L);
            }
            if (measure) memory = static_cast<T *>(::operator new(used * sizeof(T), std::align_val_t(64)));
        }
        if (n.dropout <= 0) kept = weights;
        shifts = new int64_t[J];
        jumps = new int64_t[J];
        for (int64_t j = 0; j < J; j++) {
            shifts[j] = j / n.columns * n.pitch() + j % n.columns;
            for (int64_t c = 0; c < n.coded; c++)
                for (int64_t v = 0; v < n.outputs; v++)
                    codes[(c * J + j) * n.outputs + v] = position[(c * n.outputs + v) * J + j];
        }
        // Finite, so that padding pixels, whose neighbors may all be outside, give no NaN.
        std::fill(outside, outside + plane, T(-1e30));
        for (int64_t y = 0; y < n.height; y++) std::fill_n(outside + place(y), n.width, T(0));
        std::fill(keys, keys + d * G * plane, T(0));
        std::fill(values, values + d * G * plane, T(0));
    }

    ~Worker() {
        ::operator delete(memory, std::align_val_t(64));
        delete[] shifts;
        delete[] jumps;
    }

    int64_t place(int64_t y) const { return (y + n.reach_rows()) * n.pitch() + n.reach_columns(); }

    void pad(const T *from, T *to) const {
        for (int64_t c = 0; c < n.channels * n.poses; c++)
            for (int64_t y = 0; y < n.height; y++)
                std::copy_n(from + c * n.pixels() + y * n.width, n.width, to + c * plane + place(y));
    }

    void crop(const T *from, T *to) const {
        for (int64_t c = 0; c < n.channels * n.poses; c++)
            for (int64_t y = 0; y < n.height; y++)
                std::copy_n(from + c * plane + place(y), n.width, to + c * n.pixels() + y * n.width);
    }

    // Moves to the run of pixels that starts at t, and to the rows of neighbors that lie in the image.
    void move_to(int64_t t) {
        for (int l = 0; l < L; l++) {
            int64_t y = (t + l) / n.pitch(), x = (t + l) % n.pitch();
            real[l] = y < n.height && x < n.width;
            source[l] = real[l] ? y * n.width + x : 0;
        }
        int64_t top_row = t / n.pitch(), last_row = std::min(n.height - 1, (t + L - 1) / n.pitch());
        int64_t begin = 0, end = n.rows;
        while (last_row + begin - n.rows / 2 < 0) begin++;
        while (top_row + end - 1 - n.rows / 2 >= n.height) end--;
        first = begin * n.columns;
        count = (end - begin) * n.columns;
        for (int64_t j = 0; j < count; j++) jumps[j] = shifts[first + j] + t;
    }

    void gather(const T *from, T *to, int64_t planes, T factor, bool zero) const {
        for (int64_t c = 0; c < planes; c++) {
            const T *row = from + c * n.pixels();
            for (int l = 0; l < L; l++) to[c * L + l] = zero && !real[l] ? T(0) : row[source[l]] * factor;
        }
    }

    // From [pose][channel] to channels of fields with poses.
    void scatter(const T *from, T *to, int64_t poses, int64_t orders, T factor) const {
        for (int64_t g = 0; g < poses; g++)
            for (int64_t c = 0; c < n.channels; c++) {
                T *row = to + (c * orders + g) * n.pixels();
                const T *values = from + (g * n.channels + c) * L;
                for (int l = 0; l < L; l++)
                    if (real[l]) row[source[l]] = values[l] * factor;
            }
    }

    // The part of the shared scores that does not depend on the neighbor.
    void biases() {
        int64_t G = n.poses;
        for (int64_t g = 0; g < G; g++)
            for (int64_t m = 0; m < G; m++) {
                Vector<T> score{};
                for (int64_t c = 0; c < n.posed; c++)
                    score += load(query + ((n.channels - n.posed + c) * G + g) * L) * pose[(c * G + g) * G + m];
                store<T>(bias + (g * G + m) * L, score);
            }
    }

    // Keeps or drops each pose and neighbor for the pixel of each lane, by a hash of their numbers.
    void drop(int64_t head) {
        using Bits = Vector<uint32_t, L>;
        using Mask = Vector<std::conditional_t<sizeof(T) == 4, int32_t, int64_t>>;
        int64_t GG = n.poses * n.poses, row = (head * n.neighbors() + first) * GG;
        T inverse = T(1 / (1 - n.dropout));
        uint32_t bound = static_cast<uint32_t>(std::min(n.dropout * 4294967296.0, 4294967295.0));
        const T *from = weights;
        T *to = kept;
        Bits pixel;
        for (int l = 0; l < L; l++) pixel[l] = static_cast<uint32_t>(source[l]) * 0x9e3779b9u;
        for (int64_t i = 0, size = count * GG * L; i < size; i += L, row++) {
            uint32_t low = hash(static_cast<uint32_t>(row) ^ seed[0]), high = hash(low + seed[1]);
            Bits x = pixel + low;
            x = (x ^ (x >> 16)) * 0x7feb352du ^ high;
            x = (x ^ (x >> 15)) * 0x846ca68bu;
            x ^= x >> 16;
            Vector<T> weight = load(from + i) * inverse;
            store<T>(to + i, __builtin_convertvector(x >= bound, Mask) ? weight : Vector<T>{});
        }
    }

    void exponentials(T *x, int64_t size) const {
#pragma omp simd
        for (int64_t i = 0; i < size; i++) x[i] = fast_exp(x[i]);
    }

    // E, with its maximum and its sum over the poses of the keys.
    void attend_to_poses(int64_t head) {
        int64_t G = n.poses;
        biases();
        for (int64_t j = 0; j < count; j++) {
            T *E = weights + j * G * G * L;
            product<T>(G, G, {query, L, G * L, 0}, {keys + jumps[j], plane, G * plane, nullptr}, {E, G * L, L, false},
                       1, n.channels);
            Vector<T> mask = load(outside + jumps[j]);
            for (int64_t g = 0; g < G; g++) {
                Vector<T> highest = load(E + g * G * L) + load(bias + g * G * L);
                for (int64_t m = 1; m < G; m++) {
                    Vector<T> score = load(E + (g * G + m) * L) + load(bias + (g * G + m) * L);
                    highest = score > highest ? score : highest;
                }
                for (int64_t m = 0; m < G; m++) {
                    T *at = E + (g * G + m) * L;
                    store<T>(at, load(at) + load(bias + (g * G + m) * L) - highest);
                }
                store<T>(top + (j * G + g) * L, highest + mask);
            }
            exponentials(E, G * G * L);
            for (int64_t g = 0; g < G; g++) {
                Vector<T> all = load(E + g * G * L);
                for (int64_t m = 1; m < G; m++) all += load(E + (g * G + m) * L);
                store<T>(total + (j * G + g) * L, all);
            }
        }
        if (n.dropout > 0) drop(head);
    }

    // a, for some output poses, neighbor by neighbor, so that the working set stays in the L1 cache.
    void attend_to_places(int64_t v, int64_t outputs) {
        int64_t G = n.poses, J = n.neighbors(), size = outputs * G * L;
        const bool all = outputs == n.outputs;  // the output poses of a neighbor follow those of the one before
        if (all)
            product<T, true>(count * outputs, G, {codes + first * outputs, 1, J * outputs, 0},
                             {query, L, G * L, nullptr}, {placed, G * L, L, false}, 1, n.coded);
        for (int64_t j = 0; j < count; j++) {
            T *A = placed + j * size;
            if (!all)
                product<T, true>(outputs, G, {codes + (first + j) * n.outputs + v, 1, J * n.outputs, 0},
                                 {query, L, G * L, nullptr}, {A, G * L, L, false}, 1, n.coded);
            for (int64_t o = 0, i = 0; o < outputs; o++)
                for (int64_t g = 0; g < G; g++, i += L) {
                    Vector<T> score = load(A + i) + load(top + (j * G + g) * L);
                    store<T>(A + i, score);
                    if (j > 0) {
                        Vector<T> before = load(highest + i);
                        score = score > before ? score : before;
                    }
                    store<T>(highest + i, score);
                }
        }
        std::fill(mass, mass + size, T(0));
        for (int64_t j = 0; j < count; j++) {
            T *A = placed + j * size;
            for (int64_t i = 0; i < size; i += L) store<T>(A + i, load(A + i) - load(highest + i));
            exponentials(A, size);
            for (int64_t o = 0, i = 0; o < outputs; o++)
                for (int64_t g = 0; g < G; g++, i += L)
                    store<T>(mass + i, load(mass + i) + load(A + i) * load(total + (j * G + g) * L));
        }
        for (int64_t i = 0; i < size; i += L) store<T>(mass + i, T(1) / load(mass + i));
        for (int64_t j = 0; j < count; j++)
            for (int64_t i = 0; i < size; i += L)
                store<T>(placed + j * size + i, load(placed + j * size + i) * load(mass + i));
    }

    // The weight of each pose and place of the keys, summed over the poses of the query.
    void mix(int64_t j, int64_t outputs, T *to) const {
        int64_t G = n.poses;
        product<T>(outputs, G, {placed + j * outputs * G * L, G * L, L, 0}, {kept + j * G * G * L, L, G * L, nullptr},
                   {to, L, outputs * L, false}, 1, G);
    }

    // The values, summed over the poses of the keys: a row for each pose of the query.
    void mix_values() const {
        int64_t d = n.channels, G = n.poses;
        for (int64_t j = 0; j < count; j++)
            product<T>(G, d, {kept + j * G * G * L, G * L, L, 0}, {values + jumps[j], G * plane, plane, nullptr},
                       {mixture + j * d * G * L, d * L, L, false}, 1, G);
    }

    void forward(int64_t head, const T *qkv_query, T *out) {
        int64_t d = n.channels, G = n.poses;
        gather(qkv_query, query, d * G, T(n.scale), false);
        attend_to_poses(head);
        if (poses_first) mix_values();
        for (int64_t v = 0; v < n.outputs; v += most) {
            int64_t outputs = std::min(most, n.outputs - v);
            attend_to_places(v, outputs);
            if (poses_first) {
                product<T>(outputs, d, {placed, G * L, L, outputs * G * L}, {mixture, L, d * L, nullptr, d * G * L},
                           {staged, d * L, L, false}, count, G);
            } else {
                for (int64_t j = 0; j < count; j++) mix(j, outputs, mixture + j * G * outputs * L);
                product<T>(outputs, d, {mixture, L, outputs * L, G * outputs * L}, {values, G * plane, plane, jumps},
                           {staged, d * L, L, false}, count, G);
            }
            scatter(staged, out + v * n.pixels(), outputs, n.outputs, T(1));
        }
    }

    // The gradient of a, in grad_placed, and the part of these output poses in the gradients of values and E; where the
    // sum over poses comes first, in that of the mixed values instead.
    void backward_of_mixture(int64_t j, const T *grads, int64_t outputs) {
        int64_t d = n.channels, G = n.poses, GGL = G * G * L, size = outputs * G * L;
        T *DA = grad_placed + j * size, *A = placed + j * size;
        if (poses_first) {
            product<T>(outputs, G, {grads, L, n.outputs * L, 0}, {mixture + j * d * G * L, d * L, L, nullptr},
                       {DA, G * L, L, false}, 1, d);
            product<T>(G, d, {A, L, G * L, 0}, {grads, n.outputs * L, L, nullptr},
                       {grad_mixture + j * d * G * L, d * L, L, true}, 1, outputs);
            return;
        }
        mix(j, outputs, mixture);
        product<T>(d, G, {grads, n.outputs * L, L, 0}, {mixture, outputs * L, L, nullptr},
                   {grad_values + jumps[j], G * plane, plane, true}, 1, outputs);
        product<T>(outputs, G, {grads, L, n.outputs * L, 0}, {values + jumps[j], plane, G * plane, nullptr},
                   {grad_mixture, G * L, L, false}, 1, d);
        product<T>(outputs, G, {grad_mixture, G * L, L, 0}, {kept + j * GGL, G * L, L, nullptr},
                   {DA, G * L, L, false}, 1, G);
        product<T>(G, G, {A, L, G * L, 0}, {grad_mixture, L, G * L, nullptr},
                   {grad_weights + j * GGL, G * L, L, true}, 1, outputs);
    }

    void backward_of_mixed_values() {
        int64_t d = n.channels, G = n.poses, GGL = G * G * L;
        for (int64_t j = 0; j < count; j++) {
            const T *DU = grad_mixture + j * d * G * L;
            product<T>(G, G, {DU, d * L, L, 0}, {values + jumps[j], plane, G * plane, nullptr},
                       {grad_weights + j * GGL, G * L, L, false}, 1, d);
            product<T>(d, G, {DU, L, d * L, 0}, {kept + j * GGL, L, G * L, nullptr},
                       {grad_values + jumps[j], G * plane, plane, true}, 1, G);
        }
    }

    void backward(int64_t head, const T *qkv_query, const T *grad, T *grad_qkv_query) {
        int64_t d = n.channels, G = n.poses, J = n.neighbors(), GGL = G * G * L;
        gather(qkv_query, query, d * G, T(n.scale), false);
        gather(grad, grad_out, d * n.outputs, T(1), true);
        attend_to_poses(head);
        std::fill(grad_weights, grad_weights + count * GGL, T(0));
        std::fill(sum_delta, sum_delta + count * G * L, T(0));
        std::fill(grad_query, grad_query + d * G * L, T(0));
        std::fill(grad_bias, grad_bias + GGL, T(0));
        if (poses_first) {
            mix_values();
            std::fill(grad_mixture, grad_mixture + count * d * G * L, T(0));
        }
        for (int64_t v = 0; v < n.outputs; v += most) {
            int64_t outputs = std::min(most, n.outputs - v), size = outputs * G * L;
            attend_to_places(v, outputs);
            std::fill(delta, delta + size, T(0));
            for (int64_t j = 0; j < count; j++) {
                backward_of_mixture(j, grad_out + v * L, outputs);
                for (int64_t i = 0; i < size; i += L)
                    store<T>(delta + i,
                             load(delta + i) + load(grad_placed + j * size + i) * load(placed + j * size + i));
            }
            for (int64_t j = 0; j < count; j++) {
                T *DA = grad_placed + j * size, *A = placed + j * size;
                for (int64_t o = 0; o < outputs; o++)
                    for (int64_t g = 0; g < G; g++) {
                        int64_t i = (o * G + g) * L;
                        T *sums = sum_delta + (j * G + g) * L;
                        Vector<T> a = load(A + i), D = load(delta + i);
                        store<T>(sums, load(sums) + a * D);
                        store<T>(DA + i, a * (load(DA + i) - load(total + (j * G + g) * L) * D));
                    }
                product<T>(n.coded, outputs, {query, G * L, L, 0}, {DA, G * L, L, nullptr},
                           {grad_position + ((first + j) * n.coded * n.outputs + v) * L, n.outputs * L, L, true}, 1, G);
            }
            product<T, true>(n.coded, G, {codes + first * n.outputs + v, J * n.outputs, 1, n.outputs},
                             {grad_placed, L, G * L, nullptr, size}, {grad_query, L, d * L, true}, count, outputs);
        }
        if (poses_first) backward_of_mixed_values();
        for (int64_t j = 0; j < count; j++) {
            T *DE = grad_weights + j * GGL;
            for (int64_t g = 0; g < G; g++) {
                Vector<T> U = load(sum_delta + (j * G + g) * L);
                for (int64_t m = 0; m < G; m++) {
                    int64_t i = (g * G + m) * L;
                    Vector<T> D = load(kept + j * GGL + i) * load(DE + i) - load(weights + j * GGL + i) * U;
                    store<T>(DE + i, D);
                    store<T>(grad_bias + i, load(grad_bias + i) + D);
                }
            }
            product<T>(d, G, {query, G * L, L, 0}, {DE, L, G * L, nullptr},
                       {grad_keys + jumps[j], G * plane, plane, true}, 1, G);
        }
        product<T>(G, d, {grad_weights, G * L, L, GGL}, {keys, G * plane, plane, jumps}, {grad_query, d * L, L, true},
                   count, G);
        for (int64_t c = 0; c < n.posed; c++)
            for (int64_t g = 0; g < G; g++) {
                int64_t channel = d - n.posed + c;
                T *to = grad_query + (g * d + channel) * L;
                for (int64_t m = 0; m < G; m++) {
                    Vector<T> D = load(grad_bias + (g * G + m) * L);
                    store<T>(to, load(to) + D * pose[(c * G + g) * G + m]);
                    T *sums = grad_pose + ((c * G + g) * G + m) * L;
                    store<T>(sums, load(sums) + D * load(query + (channel * G + g) * L));
                }
            }
        scatter(grad_query, grad_qkv_query, G, G, T(n.scale));
    }
};

template <class T>
void forward(const T *qkv, const T *position, const T *pose, const int64_t *seed, T *out, Sizes n, int64_t threads) {
    int64_t field = n.channels * n.poses * n.pixels(), heads = n.batch * n.heads;
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Worker<T> worker(n, position, pose, seed, false);
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < heads; head++) {
            const T *from = qkv + (head / n.heads * 3 * n.heads + head % n.heads) * field;
            worker.pad(from + n.heads * field, worker.keys);
            worker.pad(from + 2 * n.heads * field, worker.values);
            for (int64_t t = 0; t < n.extent(); t += worker.L) {
                worker.move_to(t);
                worker.forward(head, from, out + head * n.channels * n.outputs * n.pixels());
            }
        }
    }
}

// Gradients of positions and poses are written for each head of each image, so that no two threads add to one number.
template <class T>
void backward(const T *grad, const T *qkv, const T *position, const T *pose, const int64_t *seed, T *grad_qkv,
              T *grad_position, T *grad_pose, Sizes n, int64_t threads) {
    int64_t field = n.channels * n.poses * n.pixels(), heads = n.batch * n.heads, J = n.neighbors();
    int64_t codes = n.coded * n.outputs * J, poses = n.posed * n.poses * n.poses;
#pragma omp parallel num_threads(threads)
    {
        const FlushSubnormals flush;
        Worker<T> worker(n, position, pose, seed, true);
        constexpr int L = Worker<T>::L;
#pragma omp for schedule(dynamic)
        for (int64_t head = 0; head < heads; head++) {
            int64_t at = (head / n.heads * 3 * n.heads + head % n.heads) * field, next = n.heads * field;
            worker.pad(qkv + at + next, worker.keys);
            worker.pad(qkv + at + 2 * next, worker.values);
            std::fill(worker.grad_keys, worker.grad_keys + n.channels * n.poses * worker.plane, T(0));
            std::fill(worker.grad_values, worker.grad_values + n.channels * n.poses * worker.plane, T(0));
            std::fill(worker.grad_position, worker.grad_position + codes * L, T(0));
            std::fill(worker.grad_pose, worker.grad_pose + poses * L, T(0));
            for (int64_t t = 0; t < n.extent(); t += L) {
                worker.move_to(t);
                worker.backward(head, qkv + at, grad + head * n.channels * n.outputs * n.pixels(), grad_qkv + at);
            }
            worker.crop(worker.grad_keys, grad_qkv + at + next);
            worker.crop(worker.grad_values, grad_qkv + at + 2 * next);
            for (int64_t j = 0; j < J; j++)
                for (int64_t i = 0; i < n.coded * n.outputs; i++)
                    grad_position[head * codes + i * J + j] =
                        lane_sum<T>(worker.grad_position + (j * n.coded * n.outputs + i) * L);
            for (int64_t i = 0; i < poses; i++) grad_pose[head * poses + i] = lane_sum<T>(worker.grad_pose + i * L);
        }
    }
}

}  // namespace

extern "C" void local_group_attention(const Scalar *qkv, const Scalar *position, const Scalar *pose,
        const int64_t *seed, Scalar *out, int64_t batch, int64_t heads, int64_t channels, int64_t poses,
        int64_t outputs, int64_t coded, int64_t posed, int64_t height, int64_t width, int64_t rows, int64_t columns,
        double scale, double dropout, int64_t threads) {
    forward<Scalar>(qkv, position, pose, seed, out,
               {batch, heads, channels, poses, outputs, coded, posed, height, width, rows, columns,
                scale, dropout},
               threads);
}
extern "C" void local_group_attention_backward(const Scalar *grad, const Scalar *qkv, const Scalar *position,
        const Scalar *pose, const int64_t *seed, Scalar *grad_qkv, Scalar *grad_position, Scalar *grad_pose,
        int64_t batch, int64_t heads, int64_t channels, int64_t poses, int64_t outputs, int64_t coded, int64_t posed,
        int64_t height, int64_t width, int64_t rows, int64_t columns, double scale, double dropout, int64_t threads) {
    backward<Scalar>(grad, qkv, position, pose, seed, grad_qkv, grad_position, grad_pose,
                {batch, heads, channels, poses, outputs, coded, posed, height, width, rows, columns,
                 scale, dropout},
                threads);
}
