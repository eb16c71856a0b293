// Definitions for the text of every loop program. There are no includes.
typedef struct { unsigned short bits; } bf16;
typedef struct { unsigned short bits; } f16;

template <typename To, typename From> __device__ __forceinline__ To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits of equal number");
  union Both { From from; To to; __device__ Both() {} } both;
  both.from = from;
  return both.to;
}

__device__ __forceinline__ float from_bf16(bf16 x) { return __uint_as_float((unsigned int)x.bits << 16); }

// Rounds to nearest, ties to even.
__device__ __forceinline__ bf16 to_bf16(float x) {
  bf16 result;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
#else
  const unsigned int bits = __float_as_uint(x);
  result.bits = x != x ? 0x7fff : (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
#endif
  return result;
}

__device__ __forceinline__ float from_f16(f16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

__device__ __forceinline__ f16 to_f16(float x) {
  f16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}

template <typename T> __device__ __forceinline__ T greater(T a, T b) { return a != a ? a : b != b ? b : a > b ? a : b; }
template <typename T> __device__ __forceinline__ T lesser(T a, T b) { return a != a ? a : b != b ? b : a < b ? a : b; }

struct Sum { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return (T)(a + b); } };
struct Product { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return (T)(a * b); } };
struct Greater { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return greater<T>(a, b); } };
struct Lesser { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return lesser<T>(a, b); } };
struct BitAnd { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return (T)(a & b); } };
struct BitOr { template <typename T> static __device__ __forceinline__ T of(T a, T b) { return (T)(a | b); } };
struct LogicalAnd { static __device__ __forceinline__ bool of(bool a, bool b) { return a && b; } };
struct LogicalOr { static __device__ __forceinline__ bool of(bool a, bool b) { return a || b; } };

// The threads of a warp exchange values of any type 32 bits at a time.
template <typename T> __device__ __forceinline__ T from_lane(T value, int distance) {
  if constexpr (sizeof(T) == 8) {
    unsigned long long bits = same_bits<unsigned long long>(value);
    unsigned int low = __shfl_xor_sync(0xffffffffu, (unsigned int)bits, distance);
    unsigned int high = __shfl_xor_sync(0xffffffffu, (unsigned int)(bits >> 32), distance);
    return same_bits<T>(((unsigned long long)high << 32) | low);
  } else if constexpr (sizeof(T) == 4) {
    return same_bits<T>(__shfl_xor_sync(0xffffffffu, same_bits<unsigned int>(value), distance));
  } else {
    return (T)__shfl_xor_sync(0xffffffffu, (int)value, distance);
  }
}

// Reduces a value over all threads of a block and returns the result to all of them, always in the same order.
template <typename T, typename F> __device__ T over_block(T value, double* shared) {
  for (int distance = 16; distance > 0; distance /= 2) value = F::of(value, from_lane(value, distance));
  const int warps = blockDim.x / 32;
  if (warps > 1) {
    T* partial = (T*)shared;
    __syncthreads();
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    value = partial[0];
    for (int warp = 1; warp < warps; ++warp) value = F::of(value, partial[warp]);
  }
  return value;
}

// Reduces a value over the threads of a column and returns the result to all of them.
template <typename T, typename F> __device__ T over_column(T value, double* shared) {
  T* partial = (T*)shared;
  __syncthreads();
  partial[threadIdx.y * blockDim.x + threadIdx.x] = value;
  __syncthreads();
  value = partial[threadIdx.x];
  for (int y = 1; y < blockDim.y; ++y) value = F::of(value, partial[y * blockDim.x + threadIdx.x]);
  return value;
}

// Saturates, so that truncation does not turn an out-of-range element into a valid index.
template <typename I> __device__ __forceinline__ I as_index(long long value) {
  const long long most = sizeof(I) == 4 ? 0x3fffffffLL : 0x3fffffffffffffffLL;
  return (I)(value < -most ? -most : value > most ? most : value);
}
template <typename I> __device__ __forceinline__ I as_index(unsigned long long value) {
  const unsigned long long most = sizeof(I) == 4 ? 0x3fffffffULL : 0x3fffffffffffffffULL;
  return (I)(value > most ? most : value);
}

template <typename To, typename From> __device__ __forceinline__ To to_integer(From value) { return (To)(long long)value; }

// Integers wrap; division by zero gives -1, with the dividend as its remainder.
template <typename T> __device__ __forceinline__ T quotient(T a, T b) {
  if (b == 0) return (T)-1;
  if ((T)-1 < (T)0 && b == (T)-1) return (T)(0 - (unsigned long long)a);
  return (T)(a / b);
}
template <typename T> __device__ __forceinline__ T remainder(T a, T b) {
  if (b == 0) return a;
  if ((T)-1 < (T)0 && b == (T)-1) return (T)0;
  return (T)(a % b);
}
template <typename T> __device__ T power(T base, T exponent) {
  if (exponent < (T)0) return base == (T)1 ? (T)1 : base == (T)-1 ? (exponent % 2 ? (T)-1 : (T)1) : (T)0;
  unsigned long long result = 1, square = (unsigned long long)base, left = (unsigned long long)exponent;
  for (; left; left >>= 1) {
    if (left & 1) result *= square;
    square *= square;
  }
  return (T)result;
}

template <typename T> struct Bits { typedef unsigned long long type; };
template <> struct Bits<int> { typedef unsigned int type; };
template <> struct Bits<unsigned int> { typedef unsigned int type; };
template <> struct Bits<short> { typedef unsigned short type; };
template <> struct Bits<unsigned short> { typedef unsigned short type; };
template <> struct Bits<signed char> { typedef unsigned char type; };
template <> struct Bits<unsigned char> { typedef unsigned char type; };

template <typename T> __device__ __forceinline__ T shift_left(T a, T by) {
  typedef typename Bits<T>::type U;
  return (U)by >= 8 * sizeof(T) ? (T)0 : (T)((U)a << (U)by);
}
template <typename T> __device__ __forceinline__ T shift_right(T a, T by) {
  typedef typename Bits<T>::type U;
  return (U)by >= 8 * sizeof(T) ? (T)0 : (T)((U)a >> (U)by);
}
template <typename T> __device__ __forceinline__ T shift_right_signed(T a, T by) {
  typedef typename Bits<T>::type U;
  const int unused = 64 - 8 * (int)sizeof(T);
  const U most = (U)(8 * sizeof(T) - 1);
  const int distance = (int)((U)by > most ? most : (U)by);
  return (T)(((long long)((unsigned long long)(U)a << unused) >> unused) >> distance);
}
template <typename T> __device__ __forceinline__ int bits_set(T a) { return __popcll((unsigned long long)(typename Bits<T>::type)a); }
template <typename T> __device__ __forceinline__ int leading_zeros(T a) {
  return __clzll((long long)(unsigned long long)(typename Bits<T>::type)a) - (64 - 8 * (int)sizeof(T));
}

// Rounds to the nearest number with the given bits of exponent and mantissa.
__device__ __forceinline__ float with_precision(float x, int exponent_bits, int mantissa_bits) {
  if (x != x) return x;
  unsigned int bits = __float_as_uint(x);
  if (mantissa_bits < 23) {
    const int gone = 23 - mantissa_bits;
    bits += ((1u << (gone - 1)) - 1u) + ((bits >> gone) & 1u);
    bits &= ~((1u << gone) - 1u);
  }
  if (exponent_bits < 8) {
    const unsigned int bias = (1u << (exponent_bits - 1)) - 1u;
    const unsigned int exponent = (bits >> 23) & 0xffu, sign = bits & 0x80000000u;
    if (exponent > 127u + bias) bits = sign | 0x7f800000u;
    else if (exponent <= 127u - bias) bits = sign;
  }
  return __uint_as_float(bits);
}
__device__ __forceinline__ double with_precision(double x, int exponent_bits, int mantissa_bits) {
  return exponent_bits >= 11 && mantissa_bits >= 52 ? x : (double)with_precision((float)x, exponent_bits, mantissa_bits);
}

// Threefry-2x32 with 20 rounds (Salmon et al. 2011).
__device__ unsigned int threefry(int word, unsigned int k0, unsigned int k1, unsigned int a, unsigned int b) {
  const unsigned int keys[3] = {k0, k1, k0 ^ k1 ^ 0x1bd11bdau};
  const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  a += keys[0];
  b += keys[1];
#pragma unroll
  for (int group = 0; group < 5; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int by = rotations[group % 2 * 4 + i];
      a += b;
      b = ((b << by) | (b >> (32 - by))) ^ a;
    }
    a += keys[(group + 1) % 3];
    b += keys[(group + 2) % 3] + (unsigned int)(group + 1);
  }
  return word == 0 ? a : word == 1 ? b : a ^ b;
}

__device__ __forceinline__ void add_to(float* place, float value) { atomicAdd(place, value); }
__device__ __forceinline__ void add_to(double* place, double value) { atomicAdd(place, value); }
__device__ __forceinline__ void add_to(int* place, int value) { atomicAdd(place, value); }
__device__ __forceinline__ void add_to(unsigned int* place, unsigned int value) { atomicAdd(place, value); }
__device__ __forceinline__ void add_to(unsigned long long* place, unsigned long long value) { atomicAdd(place, value); }
__device__ __forceinline__ void add_to(long long* place, long long value) {
  atomicAdd((unsigned long long*)place, (unsigned long long)value);
}

// The type in which an element in memory is computed.
template <typename T> struct In {
  typedef T computed;
  static __device__ __forceinline__ T loaded(T x) { return x; }
  static __device__ __forceinline__ T stored(T x) { return x; }
};
template <> struct In<bf16> {
  typedef float computed;
  static __device__ __forceinline__ float loaded(bf16 x) { return from_bf16(x); }
  static __device__ __forceinline__ bf16 stored(float x) { return to_bf16(x); }
};
template <> struct In<f16> {
  typedef float computed;
  static __device__ __forceinline__ float loaded(f16 x) { return from_f16(x); }
  static __device__ __forceinline__ f16 stored(float x) { return to_f16(x); }
};
template <int N> struct Unsigned;
template <> struct Unsigned<1> { typedef unsigned char type; };
template <> struct Unsigned<2> { typedef unsigned short type; };
template <> struct Unsigned<4> { typedef unsigned int type; };
template <> struct Unsigned<8> { typedef unsigned long long type; };

// Atomically combines a value with an element in memory. Elements below 32 bits are exchanged within an aligned word of
// 32.
template <typename F, typename T> __device__ void combine_with(T* place, typename In<T>::computed value) {
  typedef typename Unsigned<sizeof(T)>::type Part;
  typedef typename Unsigned<(sizeof(T) < 4 ? 4 : sizeof(T))>::type Word;
  const unsigned long long address = (unsigned long long)place, in_word = address % sizeof(Word);
  Word* word = (Word*)(address - in_word);
  const int shift = 8 * (int)in_word;
  const Word mask = (Word)(Part)~(Part)0 << shift;
  Word old = *word, seen;
  do {
    seen = old;
    const T now = same_bits<T>((Part)(seen >> shift));
    const T next = In<T>::stored(F::of(In<T>::loaded(now), value));
    old = atomicCAS(word, seen, (Word)((seen & ~mask) | ((Word)same_bits<Part>(next) << shift)));
  } while (old != seen);
}
