// Definitions for the text of loop programs over tiles. A block of four warps takes 64 rows, 16 each, and iterates over
// tiles. A tile of values is distributed over a warp's threads like the results of tensor cores (PTX ISA,
// mma.m16n8k16). For every 8 columns, a thread has four elements: in the rows lane / 4 and 8 below it, at the columns 2
// * (lane % 4) and 1 after it.

__device__ __forceinline__ unsigned int shared_address(const void* p) { return (unsigned int)__cvta_generic_to_shared(p); }

// Loads four, or two, matrices of 8 by 8 elements of 16 bits. Lanes 0-7 give the addresses of the first one's rows, the
// next eight lanes those of the second.
__device__ __forceinline__ void matrices_4(unsigned int (&m)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];" : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void matrices_2(unsigned int (&m)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(shared_address(row)) : "memory");
}
__device__ __forceinline__ void turned_2(unsigned int (&m)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(m[0]), "=r"(m[1]) : "r"(shared_address(row)) : "memory");
}

// c += a b, with a of 16 by 16 elements, b of 16 by 8, and sums in single precision.
template <typename T> __device__ __forceinline__ void multiply_add(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]);
template <> __device__ __forceinline__ void multiply_add<bf16>(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <> __device__ __forceinline__ void multiply_add<f16>(float (&c)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <typename T> __device__ __forceinline__ unsigned int packed(float low, float high) {
  return (unsigned int)In<T>::stored(low).bits | (unsigned int)In<T>::stored(high).bits << 16;
}

struct alignas(16) Words { unsigned int word[4]; };

// Loads strips of LENGTH elements into rows of LEAD elements of shared memory, and defines the first PADDED of each.
// Elements beyond a strip's length, and rows from `rows` on, are zero. `base` returns the start of a row's strip.
template <typename T, int ROWS, int LENGTH, int PADDED, int LEAD, typename Base>
__device__ __forceinline__ void load_strips(T* to, const T* from, int rows, long long stride, Base base) {
  constexpr int WIDE = 16 / sizeof(T);
  for (int i = (int)threadIdx.x; i < ROWS * (PADDED / WIDE); i += (int)blockDim.x) {
    const int row = i / (PADDED / WIDE), column = i % (PADDED / WIDE) * WIDE;
    union { Words words; T elements[WIDE]; } chunk;
    chunk.words = Words{{0, 0, 0, 0}};
    if (row < rows) {
      const T* strip = from + (long long)base(row);
      if (LENGTH % WIDE == 0 && stride == 1 && (unsigned long long)strip % 16 == 0) {
        if (column < LENGTH) chunk.words = *(const Words*)(strip + column);
      } else {
#pragma unroll
        for (int k = 0; k < WIDE; ++k)
          if (column + k < LENGTH) chunk.elements[k] = strip[(column + k) * stride];
      }
    }
    *(Words*)(to + row * LEAD + column) = chunk.words;
  }
}

// Sums of products of 16 rows of a with 8 N rows of b, over DEPTH elements of each.
template <typename T, int DEPTH, int N, int LEAD> struct Inner {
  static __device__ __forceinline__ void of(float (&c)[N][4], const T* a, const T* b, int lane) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n][e] = 0;
#pragma unroll 4
    for (int k = 0; k < DEPTH; k += 16) {
      unsigned int left[4], right[2];
      matrices_4(left, a + lane % 16 * LEAD + k + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        matrices_2(right, b + (8 * n + lane % 8) * LEAD + k + lane / 8 % 2 * 8);
        multiply_add<T>(c[n], left, right);
      }
    }
  }
};
template <int DEPTH, int N, int LEAD> struct Inner<float, DEPTH, N, LEAD> {
  static __device__ __forceinline__ void of(float (&c)[N][4], const float* a, const float* b, int lane) {
    const int group = lane / 4, pair = lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) c[n][e] = 0;
#pragma unroll 4
    for (int k = 0; k < DEPTH; ++k) {
      const float left[2] = {a[group * LEAD + k], a[(group + 8) * LEAD + k]};
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] = fmaf(left[e / 2], b[(8 * n + pair + e % 2) * LEAD + k], c[n][e]);
    }
  }
};

// c += w b, with w of 16 rows by 8 N columns, distributed over the threads as above, and b of 8 N rows by 8 WIDTH
// columns.
template <typename T, int N, int WIDTH, int LEAD> struct Outer {
  static __device__ __forceinline__ void add(float (&c)[WIDTH][4], const float (&w)[N][4], const T* b, int lane, float*) {
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {
      const unsigned int left[4] = {packed<T>(w[2 * k][0], w[2 * k][1]), packed<T>(w[2 * k][2], w[2 * k][3]),
                                    packed<T>(w[2 * k + 1][0], w[2 * k + 1][1]), packed<T>(w[2 * k + 1][2], w[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < WIDTH; ++n) {
        unsigned int right[2];
        turned_2(right, b + (16 * k + lane % 16) * LEAD + 8 * n);
        multiply_add<T>(c[n], left, right);
      }
    }
  }
};
// In single precision every thread needs all values of its rows, through 16 rows of shared memory that belong to the
// warp.
template <int N, int WIDTH, int LEAD> struct Outer<float, N, WIDTH, LEAD> {
  static __device__ __forceinline__ void add(float (&c)[WIDTH][4], const float (&w)[N][4], const float* b, int lane, float* own) {
    const int group = lane / 4, pair = lane % 4 * 2, lead = 8 * N + 4;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) own[(group + e / 2 * 8) * lead + 8 * n + pair + e % 2] = w[n][e];
    __syncwarp();
#pragma unroll 4
    for (int k = 0; k < 8 * N; ++k) {
      const float left[2] = {own[group * lead + k], own[(group + 8) * lead + k]};
#pragma unroll
      for (int n = 0; n < WIDTH; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) c[n][e] = fmaf(left[e / 2], b[k * LEAD + 8 * n + pair + e % 2], c[n][e]);
    }
  }
};

// Reduces a row's value over the four threads that have its elements.
template <typename F> __device__ __forceinline__ float over_row(float value) {
  value = F::of(value, from_lane(value, 1));
  return F::of(value, from_lane(value, 2));
}
