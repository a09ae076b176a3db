// Vectors of one instruction set, written with the compiler's vector extensions.
//
// Compiled once per instruction set: LF_ISA names the namespace, LF_VECTOR_BYTES the register. Nothing
// here, nor in the files built on it, may use templates or inline functions of the standard library:
// the linker keeps one copy of those, and it could be the copy that an older CPU cannot run.
//
// bfloat16 is read two elements per 32-bit lane: shifted left, a lane is its even element as float32;
// masked, its odd one. So a `Pair` of vectors holds 2 * W elements in an order that depends on the
// type alone. Sums over an axis do not care, and storing a Pair restores the order.
#pragma once

#include "kernels.h"

#if LF_BF16_DOT
#include <immintrin.h>
#endif

#if defined(__clang__) || __GNUC__ >= 12
#define LF_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define LF_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, VI{__VA_ARGS__})
#endif
// Keeps a value in a register. Left alone, the compiler reads it from memory again at every use,
// and then the loads, not the arithmetic, set the pace of a tile.
#if defined(__x86_64__)
#define LF_KEEP(value) __asm__ volatile("" : "+v"(value))
#elif defined(__aarch64__)
#define LF_KEEP(value) __asm__ volatile("" : "+w"(value))
#else
#define LF_KEEP(value) (void)(value)
#endif
// Makes the compiler load from `pointer` anew instead of keeping what it loaded in a register.
#define LF_RELOAD(pointer) __asm__ volatile("" : "+r"(pointer))
#define LF_UNROLL _Pragma("GCC unroll 32")
#define LF_INLINE_MEMBER inline __attribute__((always_inline))
#define LF_INLINE static LF_INLINE_MEMBER

namespace lorafleet::LF_ISA {

constexpr int W = LF_VECTOR_BYTES / 4;

typedef float V __attribute__((vector_size(LF_VECTOR_BYTES)));
typedef std::uint32_t VU __attribute__((vector_size(LF_VECTOR_BYTES)));
typedef std::int32_t VI __attribute__((vector_size(LF_VECTOR_BYTES)));
typedef std::uint16_t VH __attribute__((vector_size(LF_VECTOR_BYTES / 2)));
typedef float V4 __attribute__((vector_size(16)));

struct bf16 {
  std::uint16_t bits;
};

struct Pair {
  V first, second;
};

LF_INLINE i64 min(i64 a, i64 b) { return a < b ? a : b; }
LF_INLINE i64 max(i64 a, i64 b) { return a > b ? a : b; }
LF_INLINE i64 ceil_div(i64 a, i64 b) { return (a + b - 1) / b; }
LF_INLINE i64 round_up(i64 a, i64 b) { return ceil_div(a, b) * b; }

template <class To, class From>
LF_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}

LF_INLINE V splat(float value) { return value - V{}; }
LF_INLINE VU splat(std::uint32_t value) { return value - VU{}; }

LF_INLINE V load(const float* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(V));
  return v;
}
LF_INLINE void store(float* p, V v) { __builtin_memcpy(p, &v, sizeof(V)); }

LF_INLINE V load_first(const float* p) { return load(p); }
LF_INLINE V load_second(const float* p) { return load(p + W); }
LF_INLINE V load_first(const bf16* p) {
  VU lanes;
  __builtin_memcpy(&lanes, p, sizeof(VU));
  return bit_cast<V>(lanes << 16);
}
LF_INLINE V load_second(const bf16* p) {
  VU lanes;
  __builtin_memcpy(&lanes, p, sizeof(VU));
  return bit_cast<V>(lanes & splat(0xffff0000u));
}

template <class T>
LF_INLINE Pair load_pair(const T* p) {
  return {load_first(p), load_second(p)};
}

// 2 * W elements as they are.
LF_INLINE VU load_raw(const bf16* p) {
  VU lanes;
  __builtin_memcpy(&lanes, p, sizeof(VU));
  return lanes;
}
LF_INLINE void store_raw(bf16* p, VU lanes) { __builtin_memcpy(p, &lanes, sizeof(VU)); }
LF_INLINE VU load_raw_tail(const bf16* p, i64 count) {
  bf16 padded[2 * W] = {};
  __builtin_memcpy(padded, p, count * sizeof(bf16));
  return load_raw(padded);
}

// The first `count` of 2 * W elements, zeros behind them.
template <class T>
LF_INLINE Pair load_pair_tail(const T* p, i64 count) {
  T padded[2 * W] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load_pair(padded);
}

#if LF_BF16_DOT
// acc[i] + x[2 i] * y[2 i] + x[2 i + 1] * y[2 i + 1], products exact, sums float32.
LF_INLINE V add_dots(V acc, VU x, VU y) {
  return (V)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)y);
}
#endif

// Rounds to the nearest bfloat16, ties to even; the result is in the upper half of each lane.
LF_INLINE VU round_to_bf16(V v) {
  VU bits = bit_cast<VU>(v);
  VU rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  VU quiet_nan = bits | 0x400000u;
  VU is_nan = bit_cast<VU>(v != v);
  return ((is_nan & quiet_nan) | (~is_nan & rounded)) & 0xffff0000u;
}

LF_INLINE void store_pair(float* p, Pair v) {
  store(p, v.first);
  store(p + W, v.second);
}
LF_INLINE void store_pair(bf16* p, Pair v) {
  VU lanes = (round_to_bf16(v.first) >> 16) | round_to_bf16(v.second);
  __builtin_memcpy(p, &lanes, sizeof(VU));
}

template <class T>
LF_INLINE void store_pair_tail(T* p, Pair v, i64 count) {
  T padded[2 * W];
  store_pair(padded, v);
  __builtin_memcpy(p, padded, count * sizeof(T));
}

// What rounding to the pointed-to type and back leaves of a value.
LF_INLINE V round_through(V v, const float*) { return v; }
LF_INLINE V round_through(V v, const bf16*) { return bit_cast<V>(round_to_bf16(v)); }

// Calls body(offset, count) over [0, size) in pieces of 2 * W; count < 2 * W in the last one only.
template <class Body>
LF_INLINE void for_pairs(i64 size, Body&& body) {
  i64 offset = 0;
  for (; offset + 2 * W <= size; offset += 2 * W) body(offset, 2 * W);
  if (offset < size) body(offset, size - offset);
}

template <class T>
LF_INLINE Pair load_pair(const T* p, i64 count) {
  return count == 2 * W ? load_pair(p) : load_pair_tail(p, count);
}
template <class T>
LF_INLINE void store_pair(T* p, Pair v, i64 count) {
  if (count == 2 * W) {
    store_pair(p, v);
  } else {
    store_pair_tail(p, v, count);
  }
}

// W elements in their natural order, for results that came out of a sum over lanes.
LF_INLINE V load_natural(const float* p) { return load(p); }
LF_INLINE V load_natural(const bf16* p) {
  VH bits;
  __builtin_memcpy(&bits, p, sizeof(VH));
  return bit_cast<V>(__builtin_convertvector(bits, VU) << 16);
}
LF_INLINE void store_natural(float* p, V v) { store(p, v); }
LF_INLINE void store_natural(bf16* p, V v) {
  VH bits = __builtin_convertvector(round_to_bf16(v) >> 16, VH);
  __builtin_memcpy(p, &bits, sizeof(VH));
}

template <class T>
LF_INLINE V load_natural(const T* p, i64 count) {
  if (count >= W) return load_natural(p);
  T padded[W] = {};
  __builtin_memcpy(padded, p, count * sizeof(T));
  return load_natural(padded);
}
template <class T>
LF_INLINE void store_natural(T* p, V v, i64 count) {
  if (count >= W) return store_natural(p, v);
  T padded[W];
  store_natural(padded, v);
  __builtin_memcpy(p, padded, count * sizeof(T));
}

// Folds two vectors into one: the lanes of a and b, summed two by two within 128 bits.
LF_INLINE V fold_lanes(V a, V b) {
#if LF_VECTOR_BYTES == 64
  return LF_SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
         LF_SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#elif LF_VECTOR_BYTES == 32
  return LF_SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + LF_SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
#else
  return LF_SHUFFLE(a, b, 0, 4, 1, 5) + LF_SHUFFLE(a, b, 2, 6, 3, 7);
#endif
}

// Four vectors into one: each 128-bit part holds the four sums of that part.
LF_INLINE V fold_four(V a, V b, V c, V d) {
  V ab = fold_lanes(a, b), cd = fold_lanes(c, d);
#if LF_VECTOR_BYTES == 64
  return LF_SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         LF_SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
#elif LF_VECTOR_BYTES == 32
  return LF_SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) +
         LF_SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
#else
  return LF_SHUFFLE(ab, cd, 0, 1, 4, 5) + LF_SHUFFLE(ab, cd, 2, 3, 6, 7);
#endif
}

// The four sums of four vectors. Every sum is taken in the same order, whatever its place.
LF_INLINE V4 sum_lanes(V a, V b, V c, V d) {
  V4 parts[W / 4];
  V folded = fold_four(a, b, c, d);
  __builtin_memcpy(parts, &folded, sizeof(V));
#if LF_VECTOR_BYTES == 64
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
#elif LF_VECTOR_BYTES == 32
  return parts[0] + parts[1];
#else
  return parts[0];
#endif
}

LF_INLINE float sum_lanes(V v) { return sum_lanes(v, V{}, V{}, V{})[0]; }

LF_INLINE V select(VI mask, V yes, V no) {
  return bit_cast<V>((mask & bit_cast<VI>(yes)) | (~mask & bit_cast<VI>(no)));
}

LF_INLINE float max_lanes(V v) {
  float largest = v[0];
  LF_UNROLL for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
  return largest;
}

// exp to about one unit in the last place: 2^n times a polynomial on [-ln2/2, ln2/2]. Exactly 0 below
// the smallest normal result, NaN stays NaN, and the largest result is finite.
LF_INLINE V exp(V x) {
  const V lowest = splat(-87.3365478515625f), highest = splat(88.3762626647949f);
  VI underflow = x < lowest;
  x = select(underflow, lowest, x);
  x = select(x > highest, highest, x);
  const float round_magic = 12582912.0f;
  V n = (x * 1.44269504088896341f + round_magic) - round_magic;
  V r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  V p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  VI exponent = __builtin_convertvector(n, VI);
  V power = bit_cast<V>((exponent + 127) << 23);
  return select(underflow, V{}, p * power);
}

LF_INLINE float exp_scalar(float x) { return exp(splat(x))[0]; }

// Shares `num_tasks` numbered tasks between threads: each worker calls body(next), which takes tasks
// from next(task) until none is left. Which thread runs a task never changes its result.
//
// There is a range of neighbouring tasks for each worker, since memory is read best in long streams.
// One that has finished its range helps with the next, so that nobody waits for a worker that never came.
template <class Body>
class TaskQueue {
 public:
  TaskQueue(const Body& body, i64 num_tasks, i64 num_ranges)
      : body_(body), num_tasks_(num_tasks), num_ranges_(min(num_ranges, kMaxRanges)) {
    for (i64 i = 0; i < num_ranges_; ++i) ranges_[i].taken = begin(i);
  }

  static void work(void* state) {
    TaskQueue& queue = *static_cast<TaskQueue*>(state);
    i64 range = __atomic_fetch_add(&queue.num_workers_, 1, __ATOMIC_RELAXED) % queue.num_ranges_;
    i64 ranges_left = queue.num_ranges_;
    queue.body_([&](i64& task) __attribute__((always_inline)) {
      for (; ranges_left > 0; --ranges_left, range = (range + 1) % queue.num_ranges_) {
        task = __atomic_fetch_add(&queue.ranges_[range].taken, 1, __ATOMIC_RELAXED);
        if (task < queue.begin(range + 1)) return true;
      }
      return false;
    });
  }

 private:
  static constexpr i64 kMaxRanges = 16;
  struct alignas(64) Range {
    i64 taken;
  };

  i64 begin(i64 range) const { return num_tasks_ * range / num_ranges_; }

  const Body& body_;
  i64 num_tasks_;
  i64 num_ranges_;
  i64 num_workers_ = 0;
  Range ranges_[kMaxRanges];
};

// Below this many estimated nanoseconds a second thread costs more than it brings.
constexpr i64 kParallelNs = 4000;

template <class Body>
LF_INLINE void run_tasks(i64 num_tasks, i64 estimated_ns, const Body& body) {
  bool is_shared = num_tasks > 1 && estimated_ns >= kParallelNs;
  TaskQueue<Body> queue(body, num_tasks, is_shared ? max_workers() : 1);
  if (is_shared) {
    run_workers(TaskQueue<Body>::work, &queue);
  } else {
    TaskQueue<Body>::work(&queue);
  }
}

template <class T>
LF_INLINE T* scratch_array(Scratch purpose, i64 count) {
  return static_cast<T*>(scratch(purpose, count * sizeof(T)));
}

}  // namespace lorafleet::LF_ISA
