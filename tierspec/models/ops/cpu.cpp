// Row-wise kernels of the decoder on CPU: norms, rotary embedding with KV write, paged attention, gated activation.
//
// Each output row is computed by one instruction sequence that depends on that row alone, never on how many rows, which
// batch or what padding share the call. That is what makes `numerics: invariant` hold; keep it so when changing anything.
//
// Layouts: K pages [page][kv_head][head_dim][64], V pages [page][kv_head][64][head_dim]; T is float or bf16 (as uint16_t).

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int kPage = 64;
constexpr int kRowBlock = 8;

struct bf16 {
  uint16_t bits;
};

inline float load(float v) { return v; }
inline float load(bf16 v) {
  uint32_t u = static_cast<uint32_t>(v.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

template <class T> inline T store(float v);
template <> inline float store<float>(float v) { return v; }
template <> inline bf16 store<bf16>(float v) {
  uint32_t u;
  std::memcpy(&u, &v, 4);
  u += 0x7fffu + ((u >> 16) & 1u);
  return bf16{static_cast<uint16_t>(u >> 16)};
}

template <class T> inline float rounded(float v) { return load(store<T>(v)); }

// exp for arguments <= 0 or of moderate size: range reduction by ln 2 and a degree-6 polynomial, relative error below 1e-7.
inline float exp_approx(float x) {
  x = std::min(std::max(x, -87.0f), 88.0f);
  float n = std::nearbyint(x * 1.44269504088896341f);
  float r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  int32_t e = (static_cast<int32_t>(n) + 127) << 23;
  float s;
  std::memcpy(&s, &e, 4);
  return p * s;
}

template <class T>
void norm_row(const T *x, const T *weight, T *out, int64_t dim, float eps) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < dim; ++i) {
    float v = load(x[i]);
    sum += v * v;
  }
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(dim) + eps);
#pragma omp simd
  for (int64_t i = 0; i < dim; ++i) out[i] = store<T>(rounded<T>(load(x[i]) * scale) * load(weight[i]));
}

template <class T>
void rms_norm(const T *x, const T *weight, T *out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for if (rows >= 32)
  for (int64_t r = 0; r < rows; ++r) norm_row(x + r * dim, weight, out + r * dim, dim, eps);
}

template <class T>
void add_rms_norm(T *residual, const T *x, const T *weight, T *out, int64_t rows, int64_t dim, float eps) {
#pragma omp parallel for if (rows >= 32)
  for (int64_t r = 0; r < rows; ++r) {
    T *res = residual + r * dim;
    const T *add = x + r * dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) res[i] = store<T>(load(res[i]) + load(add[i]));
    norm_row(res, weight, out + r * dim, dim, eps);
  }
}

template <class T>
void norm_heads(T *x, const T *weights, int64_t rows, int64_t width, int64_t heads, int64_t dim, float eps) {
#pragma omp parallel for if (rows >= 32)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h) {
      T *head = x + r * width + h * dim;
      norm_row(head, weights + h * dim, head, dim, eps);
    }
}

template <class T>
void silu_mul(const T *gate_up, T *out, int64_t rows, int64_t dim) {
#pragma omp parallel for if (rows >= 8)
  for (int64_t r = 0; r < rows; ++r) {
    const T *gate = gate_up + r * 2 * dim;
    const T *up = gate + dim;
    T *o = out + r * dim;
#pragma omp simd
    for (int64_t i = 0; i < dim; ++i) {
      float g = load(gate[i]);
      o[i] = store<T>(rounded<T>(g / (1.0f + exp_approx(-g))) * load(up[i]));
    }
  }
}

template <class T>
inline void rotate(const T *x, const float *cos, const float *sin, float *out, int half) {
#pragma omp simd
  for (int i = 0; i < half; ++i) {
    float a = load(x[i]), b = load(x[i + half]);
    out[i] = a * cos[i] - b * sin[i];
    out[i + half] = b * cos[i] + a * sin[i];
  }
}

template <class T>
void rope_store(const T *qkv, const int64_t *positions, const int64_t *slots, const float *cos, const float *sin, T *q_out,
                T *k_pages, T *v_pages, int64_t rows, int heads, int kv_heads, int dim) {
  const int half = dim / 2;
#pragma omp parallel for if (rows >= 32)
  for (int64_t r = 0; r < rows; ++r) {
    const T *row = qkv + r * (heads + 2 * kv_heads) * dim;
    const float *c = cos + positions[r] * half;
    const float *s = sin + positions[r] * half;
    float buffer[512];
    for (int h = 0; h < heads; ++h) {
      rotate(row + h * dim, c, s, buffer, half);
      T *q = q_out + (r * heads + h) * dim;
      for (int i = 0; i < dim; ++i) q[i] = store<T>(buffer[i]);
    }
    const int64_t page = slots[r] / kPage, offset = slots[r] % kPage;
    for (int h = 0; h < kv_heads; ++h) {
      rotate(row + (heads + h) * dim, c, s, buffer, half);
      T *k = k_pages + (page * kv_heads + h) * dim * kPage + offset;
      for (int i = 0; i < dim; ++i) k[i * kPage] = store<T>(buffer[i]);
      std::memcpy(v_pages + ((page * kv_heads + h) * kPage + offset) * dim, row + (heads + kv_heads + h) * dim, dim * sizeof(T));
    }
  }
}

// 16 floats; the compiler maps it to what the processor has.
typedef float vec __attribute__((vector_size(64), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(32), aligned(2)));
typedef uint32_t words __attribute__((vector_size(64)));
constexpr int kLanes = 16;

inline vec widened(const float *x) { return *reinterpret_cast<const vec *>(x); }
inline vec widened(const bf16 *x) {
  return reinterpret_cast<vec>(__builtin_convertvector(*reinterpret_cast<const halves *>(x), words) << 16);
}

// Scores of N queries against the 64 keys of a page, each widened once: scores[n][j] = scale * sum_d q[n][d] K[d][j].
template <int N, class T>
inline void page_scores(const float *q, const T *k_page, float *scores, int64_t stride, int dim, float scale) {
  vec acc[N][kPage / kLanes] = {};
  for (int d = 0; d < dim; ++d) {
#pragma GCC unroll 4
    for (int i = 0; i < kPage / kLanes; ++i) {
      const vec k = widened(k_page + d * kPage + i * kLanes);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[n][i] += q[n * dim + d] * k;
    }
  }
  for (int n = 0; n < N; ++n)
    for (int i = 0; i < kPage / kLanes; ++i) reinterpret_cast<vec *>(scores + n * stride)[i] = acc[n][i] * scale;
}

// out[n][d] += sum_j p[n][j] V[j][d] for N queries. D is the head dimension where the compiler knows it, else 0.
template <int N, int D, class T>
inline void page_values(const float *p, int64_t stride, const T *v_page, float *out, int count, int dim) {
  if constexpr (D > 0) {
    vec acc[N][D / kLanes];
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < D / kLanes; ++i) acc[n][i] = reinterpret_cast<const vec *>(out + n * D)[i];
    for (int j = 0; j < count; ++j) {
#pragma GCC unroll 8
      for (int i = 0; i < D / kLanes; ++i) {
        const vec v = widened(v_page + j * D + i * kLanes);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[n][i] += p[n * stride + j] * v;
      }
    }
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < D / kLanes; ++i) reinterpret_cast<vec *>(out + n * D)[i] = acc[n][i];
  } else {
    for (int n = 0; n < N; ++n)
      for (int j = 0; j < count; ++j)
#pragma omp simd
        for (int d = 0; d < dim; ++d) out[n * dim + d] += p[n * stride + j] * load(v_page[j * dim + d]);
  }
}

// Calls f<N>(first) for `count` queries in blocks of N, as many as the registers hold the sums of.
template <int N, class F>
inline void in_blocks(int first, int count, F f) {
  for (; count >= N; first += N, count -= N) f.template operator()<N>(first);
  if constexpr (N > 1)
    if (count > 0) in_blocks<N - 1>(first, count, f);
}

// Softmax numerators in place over whole pages; entries past `length` become zero. Returns the sum.
inline float softmax_row(float *scores, int64_t length) {
  const int64_t padded = (length + kPage - 1) / kPage * kPage;
  for (int64_t j = length; j < padded; ++j) scores[j] = -INFINITY;
  float top = -INFINITY;
#pragma omp simd reduction(max : top)
  for (int64_t j = 0; j < padded; ++j) top = std::max(top, scores[j]);
  float lanes[kPage] = {};
  for (int64_t base = 0; base < padded; base += kPage) {
#pragma omp simd
    for (int j = 0; j < kPage; ++j) {
      float e = exp_approx(scores[base + j] - top);
      e = base + j < length ? e : 0.0f;
      scores[base + j] = e;
      lanes[j] += e;
    }
  }
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int j = 0; j < kPage; ++j) sum += lanes[j];
  return sum;
}

struct Segment {
  int64_t first, rows;
};

template <class T, int D>
void attend(const T *q, const T *k_pages, const T *v_pages, const int64_t *positions, const int64_t *sequence,
            const int64_t *block_tables, int64_t table_width, T *out, int64_t rows, int heads, int kv_heads, int dim,
            float scale) {
  std::vector<Segment> segments;
  for (int64_t r = 0; r < rows;) {
    int64_t n = 1;
    while (n < kRowBlock && r + n < rows && sequence[r + n] == sequence[r]) ++n;
    segments.push_back({r, n});
    r += n;
  }
  const int group = heads / kv_heads;
  const int64_t items = static_cast<int64_t>(segments.size()) * kv_heads;
  constexpr int kQueries = D > 64 ? 2 : 4;
#pragma omp parallel if (items >= 2)
  {
    std::vector<float> queries(static_cast<size_t>(kRowBlock) * group * dim), outputs(queries.size());
    std::vector<float> sums(static_cast<size_t>(kRowBlock) * group), scores;
#pragma omp for schedule(dynamic, 1)
    for (int64_t item = 0; item < items; ++item) {
      const Segment segment = segments[item / kv_heads];
      const int head = static_cast<int>(item % kv_heads);
      const int64_t *table = block_tables + sequence[segment.first] * table_width;
      const int64_t *last = positions + segment.first;
      const int64_t longest = *std::max_element(last, last + segment.rows) + 1;
      const int64_t pages = (longest + kPage - 1) / kPage, stride = pages * kPage;
      const int n = static_cast<int>(segment.rows) * group;
      scores.resize(std::max<size_t>(scores.size(), static_cast<size_t>(n) * stride));
      for (int i = 0; i < n; ++i) {
        const T *row = q + ((segment.first + i / group) * heads + head * group + i % group) * dim;
        for (int d = 0; d < dim; ++d) queries[i * dim + d] = load(row[d]);
      }

      for (int64_t p = 0; p < pages; ++p) {
        const T *page = k_pages + (table[p] * kv_heads + head) * dim * kPage;
        for (int64_t r = 0; r < segment.rows; ++r)
          if (p * kPage <= last[r])
            in_blocks<4>(static_cast<int>(r) * group, group, [&]<int N>(int i) {
              page_scores<N>(queries.data() + i * dim, page, scores.data() + i * stride + p * kPage, stride, dim, scale);
            });
      }
      for (int i = 0; i < n; ++i) sums[i] = softmax_row(scores.data() + i * stride, last[i / group] + 1);

      std::fill(outputs.begin(), outputs.begin() + static_cast<int64_t>(n) * dim, 0.0f);
      for (int64_t p = 0; p < pages; ++p) {
        const T *page = v_pages + (table[p] * kv_heads + head) * dim * kPage;
        for (int64_t r = 0; r < segment.rows; ++r) {
          const int64_t left = last[r] + 1 - p * kPage;
          if (left > 0)
            in_blocks<kQueries>(static_cast<int>(r) * group, group, [&]<int N>(int i) {
              page_values<N, D>(scores.data() + i * stride + p * kPage, stride, page, outputs.data() + i * dim,
                                static_cast<int>(std::min<int64_t>(left, kPage)), dim);
            });
        }
      }
      for (int i = 0; i < n; ++i) {
        T *o = out + ((segment.first + i / group) * heads + head * group + i % group) * dim;
        const float inverse = 1.0f / sums[i];
        for (int d = 0; d < dim; ++d) o[d] = store<T>(outputs[i * dim + d] * inverse);
      }
    }
  }
}

}  // namespace

#define TIERSPEC_EXPORT(T, SUFFIX)                                                                                             \
  extern "C" void tierspec_rms_norm_##SUFFIX(const T *x, const T *w, T *out, int64_t rows, int64_t dim, float eps) {           \
    rms_norm(x, w, out, rows, dim, eps);                                                                                       \
  }                                                                                                                            \
  extern "C" void tierspec_add_rms_norm_##SUFFIX(T *residual, const T *x, const T *w, T *out, int64_t rows, int64_t dim,       \
                                                 float eps) {                                                                  \
    add_rms_norm(residual, x, w, out, rows, dim, eps);                                                                         \
  }                                                                                                                            \
  extern "C" void tierspec_norm_heads_##SUFFIX(T *x, const T *w, int64_t rows, int64_t width, int64_t heads, int64_t dim,      \
                                               float eps) {                                                                    \
    norm_heads(x, w, rows, width, heads, dim, eps);                                                                            \
  }                                                                                                                            \
  extern "C" void tierspec_silu_mul_##SUFFIX(const T *gate_up, T *out, int64_t rows, int64_t dim) {                            \
    silu_mul(gate_up, out, rows, dim);                                                                                         \
  }                                                                                                                            \
  extern "C" void tierspec_rope_store_##SUFFIX(const T *qkv, const int64_t *positions, const int64_t *slots, const float *cos, \
                                               const float *sin, T *q_out, T *k_pages, T *v_pages, int64_t rows, int heads,    \
                                               int kv_heads, int dim) {                                                        \
    rope_store(qkv, positions, slots, cos, sin, q_out, k_pages, v_pages, rows, heads, kv_heads, dim);                          \
  }                                                                                                                            \
  extern "C" void tierspec_attend_##SUFFIX(const T *q, const T *k_pages, const T *v_pages, const int64_t *positions,           \
                                           const int64_t *sequence, const int64_t *tables, int64_t width, T *out,              \
                                           int64_t rows, int heads, int kv_heads, int dim, float scale) {                      \
    switch (dim) {                                                                                                             \
      case 64: return attend<T, 64>(q, k_pages, v_pages, positions, sequence, tables, width, out, rows, heads, kv_heads, dim, scale);   \
      case 128: return attend<T, 128>(q, k_pages, v_pages, positions, sequence, tables, width, out, rows, heads, kv_heads, dim, scale); \
      default: return attend<T, 0>(q, k_pages, v_pages, positions, sequence, tables, width, out, rows, heads, kv_heads, dim, scale);    \
    }                                                                                                                          \
  }

TIERSPEC_EXPORT(float, f32)
TIERSPEC_EXPORT(bf16, bf16)
