/* The C interface of KPT's native CPU kernels: what Python calls through ctypes. Needs no PyTorch.
 *
 * The same sources are compiled once for each instruction set, into a library of its own: inline functions of one must not
 * be merged with those of another. Every kernel takes one struct of arguments and returns 0, or KPT_NO_MEMORY. The caller has checked all sizes and
 * dtypes; kernels read and write nothing outside of what the struct describes, at any alignment. Strides count elements.
 */
#ifndef KPT_CPU_H
#define KPT_CPU_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a struct or function below changes: the library of another version is not used. */
#define KPT_CPU_INTERFACE 9

enum { KPT_OK = 0, KPT_NO_MEMORY = 1 };

enum kpt_dtype { KPT_FLOAT32 = 0, KPT_BFLOAT16 = 1, KPT_FLOAT16 = 2, KPT_FLOAT8_E4M3FN = 3, KPT_FLOAT8_E5M2 = 4 };

/* What the scales of 8-bit weights [experts, K, N] are of: nothing, a column of N, a row of K, blocks of 128 by 128. */
enum kpt_scales { KPT_SCALES_NONE = 0, KPT_SCALES_N = 1, KPT_SCALES_K = 2, KPT_SCALES_BLOCK = 3 };

enum kpt_activation {
    KPT_SWIGLU = 0, KPT_GEGLU = 1, KPT_GEGLU_TANH = 2, KPT_REGLU = 3, /* gated: gate and up */
    KPT_SILU = 4, KPT_GELU = 5, KPT_GELU_TANH = 6, KPT_RELU = 7, KPT_RELU2 = 8 /* plain */
};

/* How logits become scores: softmax over all experts, over the chosen ones, or a sigmoid of each. */
enum kpt_score { KPT_SOFTMAX = 0, KPT_SOFTMAX_AFTER = 1, KPT_SIGMOID = 2 };

/* Rows of numbers [rows, columns]; a row is contiguous. */
struct kpt_rows {
    void* data;
    int64_t stride;
    int32_t dtype;
};

/* The matrices of the experts, [experts, K, N]; K or N is contiguous (stride 1). */
struct kpt_matrices {
    const void* data;
    int64_t stride_e, stride_k, stride_n;
    int32_t dtype;
    int32_t scales_of;
    const float* scale;
    int64_t stride_se, stride_sk, stride_sn;
};

struct kpt_activation_settings {
    int32_t kind;        /* enum kpt_activation */
    int32_t interleaved; /* gate and up alternate instead of being halves */
    int32_t limited;     /* whether `limit` holds */
    float alpha, beta, limit;
};

/* `out[r] = (x[r] * x_scale[r]) @ (weight[e] * scale[e]) * row_scale[r] + bias[e]`; rows at and past the last offset become
 * zero. x_scale is [rows, 1] or [rows, ceil(K / 128)] (x_scale_columns), only for an x of 8 bits; row_scale, which multiplies
 * sums, goes with any x. */
struct kpt_grouped_mm {
    struct kpt_rows x, out;
    struct kpt_matrices weight;
    const float* x_scale;
    int64_t x_scale_columns;
    const int32_t* offsets; /* [experts], the end row of each */
    int64_t rows, inner, columns, experts;
    int32_t threads;
    const float* row_scale; /* [rows] or NULL */
    struct kpt_rows bias;   /* [experts, columns] of floats; data NULL for none */
};

/* `out[e] = x[rows of e]^T @ grad[rows of e]`, [experts, K, N] contiguous; zero for an expert without rows. */
struct kpt_grouped_mm_wgrad {
    struct kpt_rows x, grad;
    void* out; /* of x's dtype */
    const int32_t* offsets;
    int64_t rows, inner, columns, experts;
    int32_t threads;
};

/* moe.experts. `up` is [experts, hidden, width] and `down` [experts, intermediate, hidden] however they are stored.
 * Scales are of N or of blocks. Ids that are negative or at and above `experts` contribute nothing. kpt_experts_decode sorts
 * by itself and reads no order, offsets and h; the others need the first two (see kpt_sort). */
struct kpt_experts {
    struct kpt_rows x, out;
    const void* index; /* [tokens, top_k] contiguous, int64 or int32 */
    int32_t index_is_int64;
    struct kpt_rows weights; /* [tokens, top_k] contiguous, float32, bfloat16 or float16 */
    struct kpt_matrices up, down;
    struct kpt_rows up_bias, down_bias; /* [experts, width], [experts, hidden]; data NULL for none */
    struct kpt_activation_settings act;
    const int32_t* order;   /* [pairs] */
    const int32_t* offsets; /* [experts] */
    struct kpt_rows h;      /* the pre-activation without bias, [pairs, width], data NULL unless it is to be kept */
    int64_t tokens, top_k, experts, hidden, width, intermediate;
    int32_t threads;
};

/* The gradients of moe.experts. `forward` is as given to the forward, with order, offsets and h; its `out` is unused.
 * What is not wanted has data NULL. */
struct kpt_experts_backward {
    struct kpt_experts forward;
    struct kpt_rows grad;                     /* [tokens, hidden], of x's dtype */
    struct kpt_rows grad_x;                   /* [tokens, hidden] */
    struct kpt_rows grad_weights;             /* [tokens, top_k] contiguous, of the dtype of the weights */
    struct kpt_matrices grad_up, grad_down;   /* written, in the order of their strides; of x's dtype */
    struct kpt_rows grad_up_bias, grad_down_bias;
};

/* Sort the pairs by expert, stable: order[j] is the pair of sorted row j, offsets[e] the end row of expert e. Pairs of no
 * expert here come last, in their order. */
struct kpt_sort {
    const void* index; /* [pairs] contiguous */
    int32_t index_is_int64;
    int32_t* order;   /* [pairs] */
    int32_t* offsets; /* [experts] */
    int64_t pairs, experts;
};

struct kpt_top_k_gating {
    struct kpt_rows logits;
    const float* correction_bias; /* [experts] or NULL */
    float* weights;               /* [tokens, top_k] */
    int64_t* index;               /* [tokens, top_k] */
    int64_t tokens, experts, top_k, num_groups, top_groups;
    int32_t score;
    int32_t renormalize;
    float scale;
    int32_t threads;
};

/* The gradient of the logits, [tokens, experts] of the logits' dtype, given that of the weights. */
struct kpt_top_k_gating_backward {
    struct kpt_top_k_gating forward; /* weights and index as it gave them */
    const float* grad;               /* [tokens, top_k] */
    struct kpt_rows grad_logits;
};

/* Numbers [batch, heads, tokens, dim]; dim is contiguous. */
struct kpt_heads {
    void* data;
    int64_t stride_b, stride_h, stride_t;
    int32_t dtype;
};

/* attention.dense of a dim and value_dim up to 256. What is given of the mask must all allow a key. Of each row the largest
 * score (the lowest float32 where there is none) and the sum of the exponentials less that (1 where there is none) are
 * written. All of [batch, heads, queries] is contiguous. */
struct kpt_attention {
    struct kpt_heads q, k, v, out;
    float *largest, *total, *lse;            /* lse NULL where nobody asks */
    const int32_t* intervals;                /* [.., queries, interval_count, 2], contiguous from queries on, or NULL */
    int64_t intervals_stride_b, intervals_stride_h, interval_count;
    const int32_t* blocks;                   /* [.., ceil(queries / 128), ceil(keys / 128)], likewise: 0 dead, 1 full, */
    int64_t blocks_stride_b, blocks_stride_h; /* else 2 more than a place in block_bits */
    const uint8_t* block_bits;               /* [n, 128, 16], the lowest bit first */
    const float* sinks;                      /* [heads] or NULL */
    /* Added to the scores, after the cap; each may be NULL. */
    struct kpt_heads bias;    /* [batch, heads, queries, keys]; keys are contiguous */
    const float* slopes;      /* [heads]: so much is lost for each step between key and query (ALiBi) */
    const float* by_distance; /* [heads, 2 far + 1] contiguous, by key - query - position; beyond, the ends hold */
    int64_t far;
    int64_t batch, heads, kv_heads, queries, keys, dim, value_dim, position;
    /* Dropout (kpt_attention/dropout.py): seed, offset and the number of the first row (batch, head, query), the least
     * number of 24 bits that is kept, and what the kept is multiplied by; 0 for none. */
    int64_t seed, offset, first_row;
    int32_t drop_least;
    float drop_scale;
    int32_t causal; /* query i sees the keys up to i + position */
    float scale, softcap; /* softcap 0 for none */
    int32_t threads;
};

/* The gradients of attention.dense. `forward` is as given to the forward, with out, largest and total; its lse is unused,
 * and it has no cap beside what is added to the scores. What is not wanted has data NULL. */
struct kpt_attention_backward {
    struct kpt_attention forward;
    struct kpt_heads grad;                   /* of out */
    const float* grad_lse;                   /* or NULL */
    float* common;                           /* [batch, heads, queries], written: what all scores of a row lose */
    struct kpt_heads grad_q, grad_k, grad_v; /* of q's dtype */
    float* grad_bias;        /* [batch, heads, queries, keys], written where a query sees a key; or NULL */
    float* grad_slopes;      /* [batch, heads, ceil(queries / 128)], to be summed; or NULL */
    float* grad_by_distance; /* [batch, heads, ceil(queries / 128), 2 far + 1], to be summed; or NULL */
};

/* Keys or values in pages; dim is contiguous. */
struct kpt_pages {
    const void* data;
    int64_t stride_page, stride_token, stride_head;
    int32_t dtype; /* enum kpt_dtype */
};

/* attention.paged, and attention.dense of few queries. Queries are [tokens, heads, dim], those of a sequence behind one
 * another; or, without `ends`, each sequence has `queries` of them, `stride_b` after those of the one before. A key `j` of
 * sequence `s` is row `j % page_size` of page `table[s][j / page_size]`, or without a table row `j` of page `s`. */
struct kpt_attention_paged {
    struct kpt_heads q, out; /* stride_b unused with `ends` */
    struct kpt_pages k, v;   /* of one dtype */
    float* lse;              /* contiguous [tokens, heads], without `ends` [sequences, heads, queries]; or NULL */
    const int32_t* table;    /* or NULL */
    int64_t table_stride, page_size;
    const int32_t* ends; /* [sequences + 1]: where the queries of each end, from 0; or NULL */
    /* Of each query the first key that it sees, and the first after these. NULL, without a table, for all keys of the page;
     * if `causal`, for query `i` of a sequence up to key `position + i`. */
    const int32_t* spans;
    const float* sinks;             /* [heads] or NULL */
    const float *k_scale, *v_scale; /* [kv_heads] or NULL */
    /* Added to the scores, after the cap; each may be NULL. */
    struct kpt_heads bias;    /* strides as q's; a row has a number for each key of the sequence */
    const float* slopes;      /* [heads], or as many for each sequence, `slopes_stride` apart: lost for each step */
    int64_t slopes_stride;
    const float* by_distance; /* [heads, 2 far + 1] contiguous, by key - query's place; beyond, the ends hold */
    int64_t far;
    const int32_t* places;    /* of each query among its sequence's keys; NULL for `position + query` */
    int64_t sequences, queries, heads, kv_heads, dim, value_dim, position;
    float scale, softcap; /* softcap 0 for none */
    int32_t causal, threads;
};

enum kpt_rounding { KPT_ROUND_NONE = 0, KPT_ROUND_UP = 1, KPT_ROUND_DOWN = 2 };

/* fp8.quantize: codes of numbers divided by the scale that they share with others, which is given or computed. Blocks of
 * rows and columns share one; they don't cross matrices of `matrix_rows` rows. Without block_rows all numbers do, which then
 * lie behind one another. */
struct kpt_quantize {
    struct kpt_rows x; /* [rows, columns] */
    void* codes;       /* likewise, contiguous */
    float* scale;      /* of each block of rows those of columns, contiguous */
    int64_t rows, columns, matrix_rows, block_rows, block_columns;
    int32_t dtype;    /* enum kpt_dtype, of 8 bits */
    int32_t given;    /* whether the scale is */
    int32_t rounding; /* enum kpt_rounding, of a scale that is computed */
    int32_t threads;
};

/* norm.rms: rows over the root of their mean square, times weights. */
struct kpt_rms_norm {
    struct kpt_rows x, out; /* [rows, columns], of one dtype */
    const void* weight;     /* [columns], of that dtype */
    int64_t rows, columns;
    float eps; /* added to the mean square */
    int32_t threads;
};

#define KPT_EXPORT __attribute__((visibility("default")))

KPT_EXPORT int kpt_grouped_mm(const struct kpt_grouped_mm*);
KPT_EXPORT int kpt_grouped_mm_wgrad(const struct kpt_grouped_mm_wgrad*);
KPT_EXPORT int kpt_experts_decode(const struct kpt_experts*);
KPT_EXPORT int kpt_experts_forward(const struct kpt_experts*);
KPT_EXPORT int kpt_experts_backward(const struct kpt_experts_backward*);
KPT_EXPORT int kpt_sort(const struct kpt_sort*);
KPT_EXPORT int kpt_top_k_gating(const struct kpt_top_k_gating*);
KPT_EXPORT int kpt_top_k_gating_backward(const struct kpt_top_k_gating_backward*);

KPT_EXPORT int kpt_quantize(const struct kpt_quantize*);
KPT_EXPORT int kpt_rms_norm(const struct kpt_rms_norm*);

KPT_EXPORT int kpt_attention_forward(const struct kpt_attention*);
KPT_EXPORT int kpt_attention_backward(const struct kpt_attention_backward*);
KPT_EXPORT int kpt_attention_paged(const struct kpt_attention_paged*);

/* KPT_CPU_INTERFACE as it was when the library was compiled. */
KPT_EXPORT int32_t kpt_cpu_interface(void);

/* The instruction sets that this machine has, of "amx_bf16 avx512_bf16 avx512 avx2 baseline", best first, separated by
 * blanks. There is a library for each; that of `baseline` runs everywhere, so ask it. Linux lets a process use AMX after
 * it asked for it, which this does. */
KPT_EXPORT const char* kpt_cpu_instruction_sets(void);

/* Run parallel regions in an OpenMP runtime that is loaded already (PyTorch's), given the addresses of GOMP_parallel
 * and omp_get_thread_num; both NULL for threads of the library's own. */
KPT_EXPORT void kpt_cpu_use_openmp(void* parallel, void* thread_num);

#ifdef __cplusplus
}
#endif
#endif
