/* Types shared by the kernels and the Rust side: plain C, fixed widths, no padding that is not written out.
 *
 * src/cuda/abi.rs is made from this file (QKV_BLESS=1 cargo build --features bindgen) and asserts every size and offset; the
 * sizes are asserted here too, so that a compiler which lays a struct out differently stops. Addresses of device memory are
 * uint64_t. Strides are in elements. */
#ifndef QKV_ABI_H
#define QKV_ABI_H
#include <stdint.h>

#ifdef __cplusplus
#define QKV_SIZE(type, bytes) static_assert(sizeof(struct type) == (bytes), #type " has another size than in Rust")
#else
#define QKV_SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), #type " has another size than in Rust")
#endif

/* Tokens of a tile. */
#define QKV_TILE 64
/* Channels of a head at most. */
#define QKV_MAX_DIM 512
/* Elements of a group at most, outside a cache. */
#define QKV_MAX_GROUP 256

/* Element types of tensors. */
#define QKV_F16 0
#define QKV_BF16 1
#define QKV_F32 2

/* Kinds of formats. */
#define QKV_KIND_F16 0
#define QKV_KIND_BF16 1
#define QKV_KIND_AFFINE 2
#define QKV_KIND_E4M3 3
#define QKV_KIND_E5M2 4

/* Fits of affine groups. */
#define QKV_FIT_MIN_MAX 0
#define QKV_FIT_ERROR_OPTIMAL 1
#define QKV_FIT_HQQ 2

/* Which elements share an FP8 scale. */
#define QKV_SCALE_TENSOR 0
#define QKV_SCALE_HEAD 1
#define QKV_SCALE_TOKEN_HEAD 2

/* Orders of stored codes. */
#define QKV_ORDER_ROW 0
#define QKV_ORDER_FRAGMENT 1

/* A strided tensor [tokens, heads, dim]; tokens come in batch rows of `batch_tokens`. */
struct QkvTensor {
  /* Address of element (0, 0, 0). */
  uint64_t data;
  /* Elements between batch rows, tokens, heads and channels. */
  int64_t strides[4];
  uint64_t tokens;
  uint64_t batch_tokens;
  uint32_t heads;
  uint32_t dim;
  /* QKV_F16, QKV_BF16 or QKV_F32. */
  uint32_t dtype;
  uint32_t reserved;
};
QKV_SIZE(QkvTensor, 72);

/* How keys or values are stored. */
struct QkvFormat {
  /* QKV_KIND_... */
  uint32_t kind;
  /* Bits of a code. */
  uint32_t bits;
  /* Elements of a group. */
  uint32_t group;
  /* 1: a group is neighbouring tokens of one channel; 0: neighbouring channels of one token. */
  uint32_t per_channel;
  /* QKV_FIT_... */
  uint32_t fit;
  /* Passes of the half-quadratic fit. */
  uint32_t iterations;
  /* p - 1 and 1 / beta of that fit. */
  float exponent;
  float weight;
  /* Channels of a rotation block, 0 = none. */
  uint32_t rotate;
  /* 1: keys are centred on the mean of tile 0. */
  uint32_t center;
  /* QKV_SCALE_... of FP8. */
  uint32_t granularity;
  uint32_t reserved;
};
QKV_SIZE(QkvFormat, 48);

/* Where one operand's codes and pairs lie in a page: the twin of OperandLayout. */
struct QkvOperand {
  /* Channels. */
  uint32_t dim;
  /* First byte of the codes, bytes of their section, bytes of one token's codes in row order. */
  uint32_t codes;
  uint32_t code_bytes;
  uint32_t row_bytes;
  /* First byte of the pairs or scales, bytes of their section, pairs of a tile. */
  uint32_t pairs;
  uint32_t pair_bytes;
  uint32_t pair_count;
  /* 0: keys, 1: values. */
  uint32_t value;
};
QKV_SIZE(QkvOperand, 32);

/* Block Hadamard rotation of a tensor. */
struct QkvHadamard {
  struct QkvTensor x;
  struct QkvTensor out;
  /* 32, 64 or 128 channels. */
  uint32_t block;
  uint32_t reserved;
};
QKV_SIZE(QkvHadamard, 152);

/* FP8 bytes [token][head][channel] of a tensor, and their scales. */
struct QkvFp8 {
  /* Input of encode and absmax, output of decode. */
  struct QkvTensor x;
  /* u8 [tokens, heads, dim]. */
  uint64_t bytes;
  /* f32 [1], [heads] or [tokens, heads], by `granularity`. */
  uint64_t scales;
  /* u64, optional: finite elements that saturated are added. */
  uint64_t saturated;
  /* u32 [1 + scales], zeros before and after: absmax per tensor and head. */
  uint64_t workspace;
  /* QKV_KIND_E4M3 or QKV_KIND_E5M2. */
  uint32_t kind;
  /* QKV_SCALE_... */
  uint32_t granularity;
  /* 1: encode computes the scales (per token and head) and writes them. */
  uint32_t fit;
  uint32_t reserved;
};
QKV_SIZE(QkvFp8, 120);

/* One sequence of a step: what `begin_step` writes and every layer reads. */
struct QkvSequence {
  /* Seat, or -1 in a step of slots. */
  int32_t seat;
  /* Row of its first new token in the input tensors, and new tokens; 0 where the step refused the sequence. */
  int32_t first_row;
  int32_t tokens;
  /* Tokens held before and after. */
  int32_t old_len;
  int32_t new_len;
  /* Tokens in closed tiles before and after. */
  int32_t old_packed;
  int32_t new_packed;
  int32_t reserved;
};
QKV_SIZE(QkvSequence, 32);

/* What kernels count for the host to read when it likes. Zeros at first; nothing is ever taken back. */
struct QkvStatus {
  /* Elements clamped to what f16 holds, or saturated in FP8. */
  uint64_t clamped;
  /* Sequences refused by a step: no block for a tile that closes (or an id beyond the pool), more tokens than a sequence
   * may have, a seat out of range, rows that do not ascend or are more than the tensors have. */
  uint32_t missing_blocks;
  uint32_t over_capacity;
  uint32_t bad_seats;
  uint32_t bad_rows;
  /* Tokens skipped for a slot beyond the pool. */
  uint32_t bad_slots;
  uint32_t reserved;
};
QKV_SIZE(QkvStatus, 32);

/* Opens a step for a batch. */
struct QkvBeginStep {
  /* i32 [sequences]: seats; 0 in a step of slots. */
  uint64_t seats;
  /* i32 [sequences]: tokens after this step, in a step of slots. */
  uint64_t context_lens;
  /* i32 [sequences + 1]: rows of each sequence. */
  uint64_t query_start;
  /* i64 [rows]: -1 marks padding; the slots themselves in a step of slots. Optional with seats. */
  uint64_t slot_mapping;
  /* i32 [sequences, table_width]: block of each tile, -1 = none. */
  uint64_t block_tables;
  /* i32 [max_sequences, 2]: (len, packed_len) of each seat, changed here. */
  uint64_t lengths;
  /* QkvSequence [sequences], written. */
  uint64_t step;
  /* i64 [rows], written in direct mode: slot of each row, -1 = skip. */
  uint64_t slots;
  /* QkvStatus. */
  uint64_t status;
  uint32_t sequences;
  uint32_t rows;
  uint32_t table_width;
  uint32_t max_sequences;
  uint32_t max_tokens;
  uint32_t blocks;
  /* R, or -1 in direct mode. */
  int32_t residual;
  uint32_t reserved;
};
QKV_SIZE(QkvBeginStep, 104);

/* New keys and values of a batch into one layer. */
struct QkvAppend {
  /* [rows, heads, dim]. */
  struct QkvTensor input[2];
  struct QkvFormat format[2];
  struct QkvOperand at[2];
  /* f16 or bf16 [max_sequences, heads, window_rows, dim] of this layer. */
  uint64_t window[2];
  /* f16 or bf16 [max_sequences, heads, sinks, dim] of this layer. */
  uint64_t sink[2];
  /* f32 [heads]: static FP8 scales; 0 for other formats. */
  uint64_t scales[2];
  /* f16 [max_sequences, heads, key dim] of this layer; 0 if keys are not centred. */
  uint64_t means;
  /* Pages of this layer: [blocks, heads] of page_bytes. */
  uint64_t pages;
  /* QkvSequence [sequences]. */
  uint64_t step;
  /* i32 [sequences, table_width]. */
  uint64_t block_tables;
  /* i64 [rows], direct mode. */
  uint64_t slots;
  /* QkvStatus. */
  uint64_t status;
  uint32_t heads;
  uint32_t sequences;
  uint32_t rows;
  uint32_t table_width;
  uint32_t blocks;
  uint32_t page_bytes;
  uint32_t window_rows;
  uint32_t sinks;
  /* QKV_F16 or QKV_BF16: of window and sinks. */
  uint32_t window_dtype;
  /* 1: direct mode. */
  uint32_t direct;
  /* Bytes of dynamic shared memory for the tile and for its codes. */
  uint32_t tile_bytes;
  uint32_t code_bytes;
};
QKV_SIZE(QkvAppend, 448);
/* Affine quantization of a tensor. A block takes one unit of work at a time:
 * row order, per token: `rows` neighbouring rows (token, head);
 * row order, per channel: a token group (`rows` = its tokens) by `width` channels;
 * fragment order: a tile of 64 tokens of a head. */
struct QkvQuantize {
  struct QkvTensor x;
  struct QkvFormat format;
  /* Fragment order: sections of a page that holds this operand alone. */
  struct QkvOperand at;
  /* Codes: rows [token][head] of row_bytes, or [head][tile] of at.code_bytes. */
  uint64_t codes;
  /* Pair words: [token][head][group] or [head][token group][channel], or [head][tile] of at.pair_bytes; unused with `given`. */
  uint64_t pairs;
  /* f32 (step, min) in the row order of `pairs`, or 0. */
  uint64_t given;
  /* u64 counter of clamped elements, or 0. */
  uint64_t clamped;
  uint64_t units;
  /* QKV_ORDER_... */
  uint32_t order;
  uint32_t rows;
  /* Channels of a unit. */
  uint32_t width;
  /* Per channel, row order: channels that lie side by side in a row of codes, how many such rows a token has, units of one. */
  uint32_t row_channels;
  uint32_t row_count;
  uint32_t row_units;
  /* Bytes of row_channels codes (per token: of a head's). */
  uint32_t row_bytes;
  /* Rows (per token) or channels (per channel) that shared memory holds as f32 at a time. */
  uint32_t chunk;
  /* Shared memory: words between rows of f32, bytes between rows of codes, where codes and pairs begin. */
  uint32_t x_stride;
  uint32_t code_stride;
  uint32_t codes_at;
  uint32_t pairs_at;
};
QKV_SIZE(QkvQuantize, 240);

/* The pages of a layer: page (block, head) begins at base + (block * heads + head) * page_bytes. */
struct QkvPool {
  uint64_t base;
  uint64_t page_bytes;
  uint32_t blocks;
  uint32_t heads;
  struct QkvFormat key_format;
  struct QkvFormat value_format;
  struct QkvOperand key;
  struct QkvOperand value;
};
QKV_SIZE(QkvPool, 184);

/* Codes and pairs of a tensor, decoded. */
struct QkvDequantize {
  struct QkvTensor out;
  /* Row order: [token][head] rows. Fragment order: [head][64-token tile] sections; the tiles of a batch row are its own. */
  uint64_t codes;
  /* Row order: [token][head][group] or [head][token group][channel]. Fragment order: [head][64-token tile] sections. */
  uint64_t pairs;
  struct QkvFormat format;
  /* Offsets are 0. */
  struct QkvOperand at;
  /* QKV_ORDER_... of the codes. */
  uint32_t order;
  /* 1: pairs are two f32, 0: two f16. */
  uint32_t wide;
  /* Rows that a block holds at a time. */
  uint32_t rows;
  /* Bytes between them in shared memory. */
  uint32_t code_stride;
  /* Per channel in row order: heads that a block takes at a time. */
  uint32_t unit_heads;
  uint32_t reserved;
};
QKV_SIZE(QkvDequantize, 192);

/* Blocks of a pool copied. */
struct QkvCopyBlocks {
  uint64_t base;
  /* Bytes of a block, a multiple of 16. */
  uint64_t block_bytes;
  /* i32 [count][2]: from, to. */
  uint64_t pairs;
  uint64_t count;
  /* u32: pairs that name no block are counted here. */
  uint64_t status;
  uint32_t blocks;
  uint32_t reserved;
};
QKV_SIZE(QkvCopyBlocks, 48);

/* The tokens of one sequence, decoded from its pages. */
struct QkvGather {
  struct QkvPool pool;
  struct QkvTensor key;
  struct QkvTensor value;
  /* i32 [tiles] */
  uint64_t table;
  /* f16 [heads][dim], optional: added to decoded keys. */
  uint64_t key_mean;
  /* f32 [1] or [heads], for FP8 with static scales. */
  uint64_t key_scales;
  uint64_t value_scales;
  /* u32: pages that do not exist are counted here. */
  uint64_t status;
  /* 1: a scale a head, 0: one. */
  uint32_t key_scale_step;
  uint32_t value_scale_step;
  /* QKV_ORDER_... of the pool. */
  uint32_t order;
  uint32_t code_stride;
};
QKV_SIZE(QkvGather, 384);

/* The exact tokens of one sequence in one layer. */
struct QkvExactRows {
  /* Keys and values, [len, heads, dim]. */
  struct QkvTensor out[2];
  /* f16 or bf16 [max_sequences, heads, window_rows, dim] of this layer. */
  uint64_t window[2];
  /* f16 or bf16 [max_sequences, heads, sinks, dim] of this layer. */
  uint64_t sink[2];
  uint32_t seat;
  uint32_t heads;
  uint32_t window_rows;
  uint32_t sinks;
  /* Tokens held, and tokens in closed tiles. */
  uint32_t len;
  uint32_t packed;
  /* QKV_F16 or QKV_BF16 */
  uint32_t dtype;
  uint32_t reserved;
};
QKV_SIZE(QkvExactRows, 208);

/* Pages rewritten from one order to another: between a pool and a list of pages side by side. */
struct QkvConvertPages {
  struct QkvPool pool;
  /* i64 [count]: block * heads + head, -1 = skip. */
  uint64_t pages;
  uint64_t count;
  /* [count] pages. */
  uint64_t list;
  /* u32: numbers that name no page are counted here. */
  uint64_t status;
  /* QKV_ORDER_... of both. */
  uint32_t pool_order;
  uint32_t list_order;
  /* 1: from the list to the pool. */
  uint32_t to_pool;
  uint32_t code_stride;
};
QKV_SIZE(QkvConvertPages, 232);

/* Attention of the new tokens of a step over one layer of a cache. */
struct QkvAttend {
  /* [rows, query heads, key dim] */
  struct QkvTensor q;
  /* [rows, query heads, value dim] */
  struct QkvTensor out;
  struct QkvFormat format[2];
  struct QkvOperand at[2];
  /* f16 or bf16 [max_sequences, heads, window_rows, dim] of this layer. */
  uint64_t window[2];
  /* f16 or bf16 [max_sequences, heads, sinks, dim] of this layer. */
  uint64_t sink[2];
  /* f32 [heads]: static FP8 scales; 0 for other formats. */
  uint64_t scales[2];
  /* f16 [max_sequences, heads, key dim] of this layer; 0 if keys are not centred. */
  uint64_t means;
  /* Pages of this layer: [blocks, heads] of page_bytes. */
  uint64_t pages;
  /* QkvSequence [sequences]. */
  uint64_t step;
  /* i32 [sequences, table_width]. */
  uint64_t block_tables;
  /* f32 [rows, query heads], natural logarithm, or 0. */
  uint64_t lse;
  /* f32 [query heads], or 0. */
  uint64_t sink_logits;
  /* Partial results of split units, (value dim + 2) * columns f32 each: two a block, or with a fixed split one a chunk. */
  uint64_t workspace;
  /* QkvStatus. */
  uint64_t status;
  uint32_t heads;
  /* Query heads of a kv head. */
  uint32_t group;
  uint32_t sequences;
  uint32_t table_width;
  uint32_t blocks;
  uint32_t page_bytes;
  uint32_t window_rows;
  uint32_t sinks;
  /* QKV_F16 or QKV_BF16: of window and sinks. */
  uint32_t window_dtype;
  /* 1: direct mode. */
  uint32_t direct;
  /* New tokens of a sequence at most. */
  uint32_t max_query;
  /* Columns (query, head of the group) that a unit of work has, and units that `max_query` tokens take. */
  uint32_t columns;
  uint32_t column_blocks;
  /* Tokens that a query sees, itself included; 0 = all. */
  uint32_t sliding_window;
  /* Cost of a page, of 16 exact rows and of a unit, in one measure. */
  uint32_t page_weight;
  uint32_t row_weight;
  uint32_t unit_weight;
  /* Items (pages, 16 exact rows) of a chunk where units are cut alike in every batch, and partial results that the workspace
   * holds then; 0 = cut by weight. */
  uint32_t split;
  uint32_t places;
  /* Blocks of the attend launch. */
  uint32_t blocks_launched;
  float scale;
  /* 0 = none. */
  float softcap;
};
QKV_SIZE(QkvAttend, 504);

/* Tests: the place of every bit. */
struct QkvCheckLayout {
  struct QkvFormat format;
  struct QkvOperand at;
  /* u32 [64][dim][bits]: 8 * byte + bit. */
  uint64_t bits;
  /* u32 [64][dim][2] */
  uint64_t pairs;
  uint32_t order;
  uint32_t reserved;
};
QKV_SIZE(QkvCheckLayout, 104);

/* Tests: matrix products d = a b of tiles, row-major. */
struct QkvCheckMma {
  uint64_t a;
  uint64_t b;
  uint64_t d;
  uint64_t tiles;
  /* 0: f16 m16n8k16; 1: u8 x s8, 2: u8 x u8, m16n8k32. */
  uint32_t kind;
  uint32_t reserved;
};
QKV_SIZE(QkvCheckMma, 40);

/* A partial attention result merged into another one, in place. */
struct QkvMergeStates {
  struct QkvTensor out;
  struct QkvTensor other;
  /* f32 [tokens, heads]: natural logarithms; the first is changed. */
  uint64_t lse;
  uint64_t other_lse;
};
QKV_SIZE(QkvMergeStates, 160);

/* Attention of a step's new tokens over what the cache held before it and over themselves. */
struct QkvPrefill {
  /* [rows, query heads, key dim]; [rows, heads, key dim]; [rows, heads, value dim]; [rows, query heads, value dim]. */
  struct QkvTensor q;
  struct QkvTensor input[2];
  struct QkvTensor out;
  struct QkvFormat format[2];
  struct QkvOperand at[2];
  /* As in QkvAppend. */
  uint64_t window[2];
  uint64_t sink[2];
  uint64_t scales[2];
  uint64_t means;
  uint64_t pages;
  uint64_t step;
  uint64_t block_tables;
  uint64_t status;
  /* f32 [rows, query heads], optional: natural logarithms. */
  uint64_t lse;
  /* f32 [query heads], optional. */
  uint64_t sink_logits;
  /* i32 [ranges, 2], optional: absolute tokens [start, end) that see each other. */
  uint64_t bidirectional;
  uint32_t heads;
  uint32_t sequences;
  uint32_t rows;
  uint32_t table_width;
  uint32_t blocks;
  uint32_t page_bytes;
  uint32_t window_rows;
  uint32_t sinks;
  /* QKV_F16 or QKV_BF16: of window and sinks. */
  uint32_t window_dtype;
  /* Query heads of a kv head. */
  uint32_t group;
  uint32_t ranges;
  /* Tokens that a query sees, itself included; 0 = all. */
  uint32_t sliding_window;
  /* New tokens of a sequence at most, and blocks of query rows that these make. */
  uint32_t max_query_len;
  uint32_t row_blocks;
  /* Pages of each sequence and kv head, from the first that is seen, that lie decoded in `decoded`. */
  uint32_t decoded_pages;
  /* QKV_ROWS_*, shifted by 2 for `input[1]`. */
  uint32_t input_rows;
  float scale;
  /* 0 = none. */
  float softcap;
  /* [sequences, heads, decoded_pages] of DecodedPage (kernels/prefill_decode.cuh). */
  uint64_t decoded;
};
QKV_SIZE(QkvPrefill, 640);

/* Rows can be read 16 bytes at a time; and all lie one stride apart. */
#define QKV_ROWS_VECTORS 1
#define QKV_ROWS_EVEN 2

/* Benchmarks: memory that is read or copied as fast as it goes. */
struct QkvStream {
  uint64_t from;
  /* One u32 that gets the XOR of all words of `from` added; or as many bytes as `from`. */
  uint64_t to;
  /* Vectors of 16 bytes. */
  uint64_t vectors;
};
QKV_SIZE(QkvStream, 24);

/* Benchmarks: an append without quantization. */
struct QkvPlainAppend {
  /* [rows] and [slots] of 16 * row_vectors bytes: keys, values. */
  uint64_t from[2];
  uint64_t to[2];
  /* i64 [rows], -1 = skip. */
  uint64_t slot_mapping;
  uint64_t slots;
  uint32_t row_vectors[2];
  uint32_t rows;
  uint32_t reserved;
};
QKV_SIZE(QkvPlainAppend, 64);

#endif
