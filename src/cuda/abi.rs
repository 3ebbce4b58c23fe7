// Made from kernels/abi.h: QKV_BLESS=1 cargo build --features bindgen

pub const QKV_TILE: u32 = 64;
pub const QKV_MAX_DIM: u32 = 512;
pub const QKV_MAX_GROUP: u32 = 256;
pub const QKV_F16: u32 = 0;
pub const QKV_BF16: u32 = 1;
pub const QKV_F32: u32 = 2;
pub const QKV_KIND_F16: u32 = 0;
pub const QKV_KIND_BF16: u32 = 1;
pub const QKV_KIND_AFFINE: u32 = 2;
pub const QKV_KIND_E4M3: u32 = 3;
pub const QKV_KIND_E5M2: u32 = 4;
pub const QKV_FIT_MIN_MAX: u32 = 0;
pub const QKV_FIT_ERROR_OPTIMAL: u32 = 1;
pub const QKV_FIT_HQQ: u32 = 2;
pub const QKV_SCALE_TENSOR: u32 = 0;
pub const QKV_SCALE_HEAD: u32 = 1;
pub const QKV_SCALE_TOKEN_HEAD: u32 = 2;
pub const QKV_ORDER_ROW: u32 = 0;
pub const QKV_ORDER_FRAGMENT: u32 = 1;
pub const QKV_ROWS_VECTORS: u32 = 1;
pub const QKV_ROWS_EVEN: u32 = 2;
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvTensor {
    pub data: u64,
    pub strides: [i64; 4usize],
    pub tokens: u64,
    pub batch_tokens: u64,
    pub heads: u32,
    pub dim: u32,
    pub dtype: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvTensor"][::core::mem::size_of::<QkvTensor>() - 72usize];
    ["Alignment of QkvTensor"][::core::mem::align_of::<QkvTensor>() - 8usize];
    ["Offset of field: QkvTensor::data"][::core::mem::offset_of!(QkvTensor, data) - 0usize];
    ["Offset of field: QkvTensor::strides"][::core::mem::offset_of!(QkvTensor, strides) - 8usize];
    ["Offset of field: QkvTensor::tokens"][::core::mem::offset_of!(QkvTensor, tokens) - 40usize];
    ["Offset of field: QkvTensor::batch_tokens"][::core::mem::offset_of!(QkvTensor, batch_tokens) - 48usize];
    ["Offset of field: QkvTensor::heads"][::core::mem::offset_of!(QkvTensor, heads) - 56usize];
    ["Offset of field: QkvTensor::dim"][::core::mem::offset_of!(QkvTensor, dim) - 60usize];
    ["Offset of field: QkvTensor::dtype"][::core::mem::offset_of!(QkvTensor, dtype) - 64usize];
    ["Offset of field: QkvTensor::reserved"][::core::mem::offset_of!(QkvTensor, reserved) - 68usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvFormat {
    pub kind: u32,
    pub bits: u32,
    pub group: u32,
    pub per_channel: u32,
    pub fit: u32,
    pub iterations: u32,
    pub exponent: f32,
    pub weight: f32,
    pub rotate: u32,
    pub center: u32,
    pub granularity: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvFormat"][::core::mem::size_of::<QkvFormat>() - 48usize];
    ["Alignment of QkvFormat"][::core::mem::align_of::<QkvFormat>() - 4usize];
    ["Offset of field: QkvFormat::kind"][::core::mem::offset_of!(QkvFormat, kind) - 0usize];
    ["Offset of field: QkvFormat::bits"][::core::mem::offset_of!(QkvFormat, bits) - 4usize];
    ["Offset of field: QkvFormat::group"][::core::mem::offset_of!(QkvFormat, group) - 8usize];
    ["Offset of field: QkvFormat::per_channel"][::core::mem::offset_of!(QkvFormat, per_channel) - 12usize];
    ["Offset of field: QkvFormat::fit"][::core::mem::offset_of!(QkvFormat, fit) - 16usize];
    ["Offset of field: QkvFormat::iterations"][::core::mem::offset_of!(QkvFormat, iterations) - 20usize];
    ["Offset of field: QkvFormat::exponent"][::core::mem::offset_of!(QkvFormat, exponent) - 24usize];
    ["Offset of field: QkvFormat::weight"][::core::mem::offset_of!(QkvFormat, weight) - 28usize];
    ["Offset of field: QkvFormat::rotate"][::core::mem::offset_of!(QkvFormat, rotate) - 32usize];
    ["Offset of field: QkvFormat::center"][::core::mem::offset_of!(QkvFormat, center) - 36usize];
    ["Offset of field: QkvFormat::granularity"][::core::mem::offset_of!(QkvFormat, granularity) - 40usize];
    ["Offset of field: QkvFormat::reserved"][::core::mem::offset_of!(QkvFormat, reserved) - 44usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvOperand {
    pub dim: u32,
    pub codes: u32,
    pub code_bytes: u32,
    pub row_bytes: u32,
    pub pairs: u32,
    pub pair_bytes: u32,
    pub pair_count: u32,
    pub value: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvOperand"][::core::mem::size_of::<QkvOperand>() - 32usize];
    ["Alignment of QkvOperand"][::core::mem::align_of::<QkvOperand>() - 4usize];
    ["Offset of field: QkvOperand::dim"][::core::mem::offset_of!(QkvOperand, dim) - 0usize];
    ["Offset of field: QkvOperand::codes"][::core::mem::offset_of!(QkvOperand, codes) - 4usize];
    ["Offset of field: QkvOperand::code_bytes"][::core::mem::offset_of!(QkvOperand, code_bytes) - 8usize];
    ["Offset of field: QkvOperand::row_bytes"][::core::mem::offset_of!(QkvOperand, row_bytes) - 12usize];
    ["Offset of field: QkvOperand::pairs"][::core::mem::offset_of!(QkvOperand, pairs) - 16usize];
    ["Offset of field: QkvOperand::pair_bytes"][::core::mem::offset_of!(QkvOperand, pair_bytes) - 20usize];
    ["Offset of field: QkvOperand::pair_count"][::core::mem::offset_of!(QkvOperand, pair_count) - 24usize];
    ["Offset of field: QkvOperand::value"][::core::mem::offset_of!(QkvOperand, value) - 28usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvHadamard {
    pub x: QkvTensor,
    pub out: QkvTensor,
    pub block: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvHadamard"][::core::mem::size_of::<QkvHadamard>() - 152usize];
    ["Alignment of QkvHadamard"][::core::mem::align_of::<QkvHadamard>() - 8usize];
    ["Offset of field: QkvHadamard::x"][::core::mem::offset_of!(QkvHadamard, x) - 0usize];
    ["Offset of field: QkvHadamard::out"][::core::mem::offset_of!(QkvHadamard, out) - 72usize];
    ["Offset of field: QkvHadamard::block"][::core::mem::offset_of!(QkvHadamard, block) - 144usize];
    ["Offset of field: QkvHadamard::reserved"][::core::mem::offset_of!(QkvHadamard, reserved) - 148usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvFp8 {
    pub x: QkvTensor,
    pub bytes: u64,
    pub scales: u64,
    pub saturated: u64,
    pub workspace: u64,
    pub kind: u32,
    pub granularity: u32,
    pub fit: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvFp8"][::core::mem::size_of::<QkvFp8>() - 120usize];
    ["Alignment of QkvFp8"][::core::mem::align_of::<QkvFp8>() - 8usize];
    ["Offset of field: QkvFp8::x"][::core::mem::offset_of!(QkvFp8, x) - 0usize];
    ["Offset of field: QkvFp8::bytes"][::core::mem::offset_of!(QkvFp8, bytes) - 72usize];
    ["Offset of field: QkvFp8::scales"][::core::mem::offset_of!(QkvFp8, scales) - 80usize];
    ["Offset of field: QkvFp8::saturated"][::core::mem::offset_of!(QkvFp8, saturated) - 88usize];
    ["Offset of field: QkvFp8::workspace"][::core::mem::offset_of!(QkvFp8, workspace) - 96usize];
    ["Offset of field: QkvFp8::kind"][::core::mem::offset_of!(QkvFp8, kind) - 104usize];
    ["Offset of field: QkvFp8::granularity"][::core::mem::offset_of!(QkvFp8, granularity) - 108usize];
    ["Offset of field: QkvFp8::fit"][::core::mem::offset_of!(QkvFp8, fit) - 112usize];
    ["Offset of field: QkvFp8::reserved"][::core::mem::offset_of!(QkvFp8, reserved) - 116usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvSequence {
    pub seat: i32,
    pub first_row: i32,
    pub tokens: i32,
    pub old_len: i32,
    pub new_len: i32,
    pub old_packed: i32,
    pub new_packed: i32,
    pub reserved: i32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvSequence"][::core::mem::size_of::<QkvSequence>() - 32usize];
    ["Alignment of QkvSequence"][::core::mem::align_of::<QkvSequence>() - 4usize];
    ["Offset of field: QkvSequence::seat"][::core::mem::offset_of!(QkvSequence, seat) - 0usize];
    ["Offset of field: QkvSequence::first_row"][::core::mem::offset_of!(QkvSequence, first_row) - 4usize];
    ["Offset of field: QkvSequence::tokens"][::core::mem::offset_of!(QkvSequence, tokens) - 8usize];
    ["Offset of field: QkvSequence::old_len"][::core::mem::offset_of!(QkvSequence, old_len) - 12usize];
    ["Offset of field: QkvSequence::new_len"][::core::mem::offset_of!(QkvSequence, new_len) - 16usize];
    ["Offset of field: QkvSequence::old_packed"][::core::mem::offset_of!(QkvSequence, old_packed) - 20usize];
    ["Offset of field: QkvSequence::new_packed"][::core::mem::offset_of!(QkvSequence, new_packed) - 24usize];
    ["Offset of field: QkvSequence::reserved"][::core::mem::offset_of!(QkvSequence, reserved) - 28usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvStatus {
    pub clamped: u64,
    pub missing_blocks: u32,
    pub over_capacity: u32,
    pub bad_seats: u32,
    pub bad_rows: u32,
    pub bad_slots: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvStatus"][::core::mem::size_of::<QkvStatus>() - 32usize];
    ["Alignment of QkvStatus"][::core::mem::align_of::<QkvStatus>() - 8usize];
    ["Offset of field: QkvStatus::clamped"][::core::mem::offset_of!(QkvStatus, clamped) - 0usize];
    ["Offset of field: QkvStatus::missing_blocks"]
        [::core::mem::offset_of!(QkvStatus, missing_blocks) - 8usize];
    ["Offset of field: QkvStatus::over_capacity"]
        [::core::mem::offset_of!(QkvStatus, over_capacity) - 12usize];
    ["Offset of field: QkvStatus::bad_seats"][::core::mem::offset_of!(QkvStatus, bad_seats) - 16usize];
    ["Offset of field: QkvStatus::bad_rows"][::core::mem::offset_of!(QkvStatus, bad_rows) - 20usize];
    ["Offset of field: QkvStatus::bad_slots"][::core::mem::offset_of!(QkvStatus, bad_slots) - 24usize];
    ["Offset of field: QkvStatus::reserved"][::core::mem::offset_of!(QkvStatus, reserved) - 28usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvBeginStep {
    pub seats: u64,
    pub context_lens: u64,
    pub query_start: u64,
    pub slot_mapping: u64,
    pub block_tables: u64,
    pub lengths: u64,
    pub step: u64,
    pub slots: u64,
    pub status: u64,
    pub sequences: u32,
    pub rows: u32,
    pub table_width: u32,
    pub max_sequences: u32,
    pub max_tokens: u32,
    pub blocks: u32,
    pub residual: i32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvBeginStep"][::core::mem::size_of::<QkvBeginStep>() - 104usize];
    ["Alignment of QkvBeginStep"][::core::mem::align_of::<QkvBeginStep>() - 8usize];
    ["Offset of field: QkvBeginStep::seats"][::core::mem::offset_of!(QkvBeginStep, seats) - 0usize];
    ["Offset of field: QkvBeginStep::context_lens"]
        [::core::mem::offset_of!(QkvBeginStep, context_lens) - 8usize];
    ["Offset of field: QkvBeginStep::query_start"]
        [::core::mem::offset_of!(QkvBeginStep, query_start) - 16usize];
    ["Offset of field: QkvBeginStep::slot_mapping"]
        [::core::mem::offset_of!(QkvBeginStep, slot_mapping) - 24usize];
    ["Offset of field: QkvBeginStep::block_tables"]
        [::core::mem::offset_of!(QkvBeginStep, block_tables) - 32usize];
    ["Offset of field: QkvBeginStep::lengths"][::core::mem::offset_of!(QkvBeginStep, lengths) - 40usize];
    ["Offset of field: QkvBeginStep::step"][::core::mem::offset_of!(QkvBeginStep, step) - 48usize];
    ["Offset of field: QkvBeginStep::slots"][::core::mem::offset_of!(QkvBeginStep, slots) - 56usize];
    ["Offset of field: QkvBeginStep::status"][::core::mem::offset_of!(QkvBeginStep, status) - 64usize];
    ["Offset of field: QkvBeginStep::sequences"][::core::mem::offset_of!(QkvBeginStep, sequences) - 72usize];
    ["Offset of field: QkvBeginStep::rows"][::core::mem::offset_of!(QkvBeginStep, rows) - 76usize];
    ["Offset of field: QkvBeginStep::table_width"]
        [::core::mem::offset_of!(QkvBeginStep, table_width) - 80usize];
    ["Offset of field: QkvBeginStep::max_sequences"]
        [::core::mem::offset_of!(QkvBeginStep, max_sequences) - 84usize];
    ["Offset of field: QkvBeginStep::max_tokens"]
        [::core::mem::offset_of!(QkvBeginStep, max_tokens) - 88usize];
    ["Offset of field: QkvBeginStep::blocks"][::core::mem::offset_of!(QkvBeginStep, blocks) - 92usize];
    ["Offset of field: QkvBeginStep::residual"][::core::mem::offset_of!(QkvBeginStep, residual) - 96usize];
    ["Offset of field: QkvBeginStep::reserved"][::core::mem::offset_of!(QkvBeginStep, reserved) - 100usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvAppend {
    pub input: [QkvTensor; 2usize],
    pub format: [QkvFormat; 2usize],
    pub at: [QkvOperand; 2usize],
    pub window: [u64; 2usize],
    pub sink: [u64; 2usize],
    pub scales: [u64; 2usize],
    pub means: u64,
    pub pages: u64,
    pub step: u64,
    pub block_tables: u64,
    pub slots: u64,
    pub status: u64,
    pub heads: u32,
    pub sequences: u32,
    pub rows: u32,
    pub table_width: u32,
    pub blocks: u32,
    pub page_bytes: u32,
    pub window_rows: u32,
    pub sinks: u32,
    pub window_dtype: u32,
    pub direct: u32,
    pub tile_bytes: u32,
    pub code_bytes: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvAppend"][::core::mem::size_of::<QkvAppend>() - 448usize];
    ["Alignment of QkvAppend"][::core::mem::align_of::<QkvAppend>() - 8usize];
    ["Offset of field: QkvAppend::input"][::core::mem::offset_of!(QkvAppend, input) - 0usize];
    ["Offset of field: QkvAppend::format"][::core::mem::offset_of!(QkvAppend, format) - 144usize];
    ["Offset of field: QkvAppend::at"][::core::mem::offset_of!(QkvAppend, at) - 240usize];
    ["Offset of field: QkvAppend::window"][::core::mem::offset_of!(QkvAppend, window) - 304usize];
    ["Offset of field: QkvAppend::sink"][::core::mem::offset_of!(QkvAppend, sink) - 320usize];
    ["Offset of field: QkvAppend::scales"][::core::mem::offset_of!(QkvAppend, scales) - 336usize];
    ["Offset of field: QkvAppend::means"][::core::mem::offset_of!(QkvAppend, means) - 352usize];
    ["Offset of field: QkvAppend::pages"][::core::mem::offset_of!(QkvAppend, pages) - 360usize];
    ["Offset of field: QkvAppend::step"][::core::mem::offset_of!(QkvAppend, step) - 368usize];
    ["Offset of field: QkvAppend::block_tables"][::core::mem::offset_of!(QkvAppend, block_tables) - 376usize];
    ["Offset of field: QkvAppend::slots"][::core::mem::offset_of!(QkvAppend, slots) - 384usize];
    ["Offset of field: QkvAppend::status"][::core::mem::offset_of!(QkvAppend, status) - 392usize];
    ["Offset of field: QkvAppend::heads"][::core::mem::offset_of!(QkvAppend, heads) - 400usize];
    ["Offset of field: QkvAppend::sequences"][::core::mem::offset_of!(QkvAppend, sequences) - 404usize];
    ["Offset of field: QkvAppend::rows"][::core::mem::offset_of!(QkvAppend, rows) - 408usize];
    ["Offset of field: QkvAppend::table_width"][::core::mem::offset_of!(QkvAppend, table_width) - 412usize];
    ["Offset of field: QkvAppend::blocks"][::core::mem::offset_of!(QkvAppend, blocks) - 416usize];
    ["Offset of field: QkvAppend::page_bytes"][::core::mem::offset_of!(QkvAppend, page_bytes) - 420usize];
    ["Offset of field: QkvAppend::window_rows"][::core::mem::offset_of!(QkvAppend, window_rows) - 424usize];
    ["Offset of field: QkvAppend::sinks"][::core::mem::offset_of!(QkvAppend, sinks) - 428usize];
    ["Offset of field: QkvAppend::window_dtype"][::core::mem::offset_of!(QkvAppend, window_dtype) - 432usize];
    ["Offset of field: QkvAppend::direct"][::core::mem::offset_of!(QkvAppend, direct) - 436usize];
    ["Offset of field: QkvAppend::tile_bytes"][::core::mem::offset_of!(QkvAppend, tile_bytes) - 440usize];
    ["Offset of field: QkvAppend::code_bytes"][::core::mem::offset_of!(QkvAppend, code_bytes) - 444usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvQuantize {
    pub x: QkvTensor,
    pub format: QkvFormat,
    pub at: QkvOperand,
    pub codes: u64,
    pub pairs: u64,
    pub given: u64,
    pub clamped: u64,
    pub units: u64,
    pub order: u32,
    pub rows: u32,
    pub width: u32,
    pub row_channels: u32,
    pub row_count: u32,
    pub row_units: u32,
    pub row_bytes: u32,
    pub chunk: u32,
    pub x_stride: u32,
    pub code_stride: u32,
    pub codes_at: u32,
    pub pairs_at: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvQuantize"][::core::mem::size_of::<QkvQuantize>() - 240usize];
    ["Alignment of QkvQuantize"][::core::mem::align_of::<QkvQuantize>() - 8usize];
    ["Offset of field: QkvQuantize::x"][::core::mem::offset_of!(QkvQuantize, x) - 0usize];
    ["Offset of field: QkvQuantize::format"][::core::mem::offset_of!(QkvQuantize, format) - 72usize];
    ["Offset of field: QkvQuantize::at"][::core::mem::offset_of!(QkvQuantize, at) - 120usize];
    ["Offset of field: QkvQuantize::codes"][::core::mem::offset_of!(QkvQuantize, codes) - 152usize];
    ["Offset of field: QkvQuantize::pairs"][::core::mem::offset_of!(QkvQuantize, pairs) - 160usize];
    ["Offset of field: QkvQuantize::given"][::core::mem::offset_of!(QkvQuantize, given) - 168usize];
    ["Offset of field: QkvQuantize::clamped"][::core::mem::offset_of!(QkvQuantize, clamped) - 176usize];
    ["Offset of field: QkvQuantize::units"][::core::mem::offset_of!(QkvQuantize, units) - 184usize];
    ["Offset of field: QkvQuantize::order"][::core::mem::offset_of!(QkvQuantize, order) - 192usize];
    ["Offset of field: QkvQuantize::rows"][::core::mem::offset_of!(QkvQuantize, rows) - 196usize];
    ["Offset of field: QkvQuantize::width"][::core::mem::offset_of!(QkvQuantize, width) - 200usize];
    ["Offset of field: QkvQuantize::row_channels"]
        [::core::mem::offset_of!(QkvQuantize, row_channels) - 204usize];
    ["Offset of field: QkvQuantize::row_count"][::core::mem::offset_of!(QkvQuantize, row_count) - 208usize];
    ["Offset of field: QkvQuantize::row_units"][::core::mem::offset_of!(QkvQuantize, row_units) - 212usize];
    ["Offset of field: QkvQuantize::row_bytes"][::core::mem::offset_of!(QkvQuantize, row_bytes) - 216usize];
    ["Offset of field: QkvQuantize::chunk"][::core::mem::offset_of!(QkvQuantize, chunk) - 220usize];
    ["Offset of field: QkvQuantize::x_stride"][::core::mem::offset_of!(QkvQuantize, x_stride) - 224usize];
    ["Offset of field: QkvQuantize::code_stride"]
        [::core::mem::offset_of!(QkvQuantize, code_stride) - 228usize];
    ["Offset of field: QkvQuantize::codes_at"][::core::mem::offset_of!(QkvQuantize, codes_at) - 232usize];
    ["Offset of field: QkvQuantize::pairs_at"][::core::mem::offset_of!(QkvQuantize, pairs_at) - 236usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvPool {
    pub base: u64,
    pub page_bytes: u64,
    pub blocks: u32,
    pub heads: u32,
    pub key_format: QkvFormat,
    pub value_format: QkvFormat,
    pub key: QkvOperand,
    pub value: QkvOperand,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvPool"][::core::mem::size_of::<QkvPool>() - 184usize];
    ["Alignment of QkvPool"][::core::mem::align_of::<QkvPool>() - 8usize];
    ["Offset of field: QkvPool::base"][::core::mem::offset_of!(QkvPool, base) - 0usize];
    ["Offset of field: QkvPool::page_bytes"][::core::mem::offset_of!(QkvPool, page_bytes) - 8usize];
    ["Offset of field: QkvPool::blocks"][::core::mem::offset_of!(QkvPool, blocks) - 16usize];
    ["Offset of field: QkvPool::heads"][::core::mem::offset_of!(QkvPool, heads) - 20usize];
    ["Offset of field: QkvPool::key_format"][::core::mem::offset_of!(QkvPool, key_format) - 24usize];
    ["Offset of field: QkvPool::value_format"][::core::mem::offset_of!(QkvPool, value_format) - 72usize];
    ["Offset of field: QkvPool::key"][::core::mem::offset_of!(QkvPool, key) - 120usize];
    ["Offset of field: QkvPool::value"][::core::mem::offset_of!(QkvPool, value) - 152usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvDequantize {
    pub out: QkvTensor,
    pub codes: u64,
    pub pairs: u64,
    pub format: QkvFormat,
    pub at: QkvOperand,
    pub order: u32,
    pub wide: u32,
    pub rows: u32,
    pub code_stride: u32,
    pub unit_heads: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvDequantize"][::core::mem::size_of::<QkvDequantize>() - 192usize];
    ["Alignment of QkvDequantize"][::core::mem::align_of::<QkvDequantize>() - 8usize];
    ["Offset of field: QkvDequantize::out"][::core::mem::offset_of!(QkvDequantize, out) - 0usize];
    ["Offset of field: QkvDequantize::codes"][::core::mem::offset_of!(QkvDequantize, codes) - 72usize];
    ["Offset of field: QkvDequantize::pairs"][::core::mem::offset_of!(QkvDequantize, pairs) - 80usize];
    ["Offset of field: QkvDequantize::format"][::core::mem::offset_of!(QkvDequantize, format) - 88usize];
    ["Offset of field: QkvDequantize::at"][::core::mem::offset_of!(QkvDequantize, at) - 136usize];
    ["Offset of field: QkvDequantize::order"][::core::mem::offset_of!(QkvDequantize, order) - 168usize];
    ["Offset of field: QkvDequantize::wide"][::core::mem::offset_of!(QkvDequantize, wide) - 172usize];
    ["Offset of field: QkvDequantize::rows"][::core::mem::offset_of!(QkvDequantize, rows) - 176usize];
    ["Offset of field: QkvDequantize::code_stride"]
        [::core::mem::offset_of!(QkvDequantize, code_stride) - 180usize];
    ["Offset of field: QkvDequantize::unit_heads"]
        [::core::mem::offset_of!(QkvDequantize, unit_heads) - 184usize];
    ["Offset of field: QkvDequantize::reserved"][::core::mem::offset_of!(QkvDequantize, reserved) - 188usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvCopyBlocks {
    pub base: u64,
    pub block_bytes: u64,
    pub pairs: u64,
    pub count: u64,
    pub status: u64,
    pub blocks: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvCopyBlocks"][::core::mem::size_of::<QkvCopyBlocks>() - 48usize];
    ["Alignment of QkvCopyBlocks"][::core::mem::align_of::<QkvCopyBlocks>() - 8usize];
    ["Offset of field: QkvCopyBlocks::base"][::core::mem::offset_of!(QkvCopyBlocks, base) - 0usize];
    ["Offset of field: QkvCopyBlocks::block_bytes"]
        [::core::mem::offset_of!(QkvCopyBlocks, block_bytes) - 8usize];
    ["Offset of field: QkvCopyBlocks::pairs"][::core::mem::offset_of!(QkvCopyBlocks, pairs) - 16usize];
    ["Offset of field: QkvCopyBlocks::count"][::core::mem::offset_of!(QkvCopyBlocks, count) - 24usize];
    ["Offset of field: QkvCopyBlocks::status"][::core::mem::offset_of!(QkvCopyBlocks, status) - 32usize];
    ["Offset of field: QkvCopyBlocks::blocks"][::core::mem::offset_of!(QkvCopyBlocks, blocks) - 40usize];
    ["Offset of field: QkvCopyBlocks::reserved"][::core::mem::offset_of!(QkvCopyBlocks, reserved) - 44usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvGather {
    pub pool: QkvPool,
    pub key: QkvTensor,
    pub value: QkvTensor,
    pub table: u64,
    pub key_mean: u64,
    pub key_scales: u64,
    pub value_scales: u64,
    pub status: u64,
    pub key_scale_step: u32,
    pub value_scale_step: u32,
    pub order: u32,
    pub code_stride: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvGather"][::core::mem::size_of::<QkvGather>() - 384usize];
    ["Alignment of QkvGather"][::core::mem::align_of::<QkvGather>() - 8usize];
    ["Offset of field: QkvGather::pool"][::core::mem::offset_of!(QkvGather, pool) - 0usize];
    ["Offset of field: QkvGather::key"][::core::mem::offset_of!(QkvGather, key) - 184usize];
    ["Offset of field: QkvGather::value"][::core::mem::offset_of!(QkvGather, value) - 256usize];
    ["Offset of field: QkvGather::table"][::core::mem::offset_of!(QkvGather, table) - 328usize];
    ["Offset of field: QkvGather::key_mean"][::core::mem::offset_of!(QkvGather, key_mean) - 336usize];
    ["Offset of field: QkvGather::key_scales"][::core::mem::offset_of!(QkvGather, key_scales) - 344usize];
    ["Offset of field: QkvGather::value_scales"][::core::mem::offset_of!(QkvGather, value_scales) - 352usize];
    ["Offset of field: QkvGather::status"][::core::mem::offset_of!(QkvGather, status) - 360usize];
    ["Offset of field: QkvGather::key_scale_step"]
        [::core::mem::offset_of!(QkvGather, key_scale_step) - 368usize];
    ["Offset of field: QkvGather::value_scale_step"]
        [::core::mem::offset_of!(QkvGather, value_scale_step) - 372usize];
    ["Offset of field: QkvGather::order"][::core::mem::offset_of!(QkvGather, order) - 376usize];
    ["Offset of field: QkvGather::code_stride"][::core::mem::offset_of!(QkvGather, code_stride) - 380usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvExactRows {
    pub out: [QkvTensor; 2usize],
    pub window: [u64; 2usize],
    pub sink: [u64; 2usize],
    pub seat: u32,
    pub heads: u32,
    pub window_rows: u32,
    pub sinks: u32,
    pub len: u32,
    pub packed: u32,
    pub dtype: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvExactRows"][::core::mem::size_of::<QkvExactRows>() - 208usize];
    ["Alignment of QkvExactRows"][::core::mem::align_of::<QkvExactRows>() - 8usize];
    ["Offset of field: QkvExactRows::out"][::core::mem::offset_of!(QkvExactRows, out) - 0usize];
    ["Offset of field: QkvExactRows::window"][::core::mem::offset_of!(QkvExactRows, window) - 144usize];
    ["Offset of field: QkvExactRows::sink"][::core::mem::offset_of!(QkvExactRows, sink) - 160usize];
    ["Offset of field: QkvExactRows::seat"][::core::mem::offset_of!(QkvExactRows, seat) - 176usize];
    ["Offset of field: QkvExactRows::heads"][::core::mem::offset_of!(QkvExactRows, heads) - 180usize];
    ["Offset of field: QkvExactRows::window_rows"]
        [::core::mem::offset_of!(QkvExactRows, window_rows) - 184usize];
    ["Offset of field: QkvExactRows::sinks"][::core::mem::offset_of!(QkvExactRows, sinks) - 188usize];
    ["Offset of field: QkvExactRows::len"][::core::mem::offset_of!(QkvExactRows, len) - 192usize];
    ["Offset of field: QkvExactRows::packed"][::core::mem::offset_of!(QkvExactRows, packed) - 196usize];
    ["Offset of field: QkvExactRows::dtype"][::core::mem::offset_of!(QkvExactRows, dtype) - 200usize];
    ["Offset of field: QkvExactRows::reserved"][::core::mem::offset_of!(QkvExactRows, reserved) - 204usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvConvertPages {
    pub pool: QkvPool,
    pub pages: u64,
    pub count: u64,
    pub list: u64,
    pub status: u64,
    pub pool_order: u32,
    pub list_order: u32,
    pub to_pool: u32,
    pub code_stride: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvConvertPages"][::core::mem::size_of::<QkvConvertPages>() - 232usize];
    ["Alignment of QkvConvertPages"][::core::mem::align_of::<QkvConvertPages>() - 8usize];
    ["Offset of field: QkvConvertPages::pool"][::core::mem::offset_of!(QkvConvertPages, pool) - 0usize];
    ["Offset of field: QkvConvertPages::pages"][::core::mem::offset_of!(QkvConvertPages, pages) - 184usize];
    ["Offset of field: QkvConvertPages::count"][::core::mem::offset_of!(QkvConvertPages, count) - 192usize];
    ["Offset of field: QkvConvertPages::list"][::core::mem::offset_of!(QkvConvertPages, list) - 200usize];
    ["Offset of field: QkvConvertPages::status"][::core::mem::offset_of!(QkvConvertPages, status) - 208usize];
    ["Offset of field: QkvConvertPages::pool_order"]
        [::core::mem::offset_of!(QkvConvertPages, pool_order) - 216usize];
    ["Offset of field: QkvConvertPages::list_order"]
        [::core::mem::offset_of!(QkvConvertPages, list_order) - 220usize];
    ["Offset of field: QkvConvertPages::to_pool"]
        [::core::mem::offset_of!(QkvConvertPages, to_pool) - 224usize];
    ["Offset of field: QkvConvertPages::code_stride"]
        [::core::mem::offset_of!(QkvConvertPages, code_stride) - 228usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvAttend {
    pub q: QkvTensor,
    pub out: QkvTensor,
    pub format: [QkvFormat; 2usize],
    pub at: [QkvOperand; 2usize],
    pub window: [u64; 2usize],
    pub sink: [u64; 2usize],
    pub scales: [u64; 2usize],
    pub means: u64,
    pub pages: u64,
    pub step: u64,
    pub block_tables: u64,
    pub lse: u64,
    pub sink_logits: u64,
    pub workspace: u64,
    pub status: u64,
    pub heads: u32,
    pub group: u32,
    pub sequences: u32,
    pub table_width: u32,
    pub blocks: u32,
    pub page_bytes: u32,
    pub window_rows: u32,
    pub sinks: u32,
    pub window_dtype: u32,
    pub direct: u32,
    pub max_query: u32,
    pub columns: u32,
    pub column_blocks: u32,
    pub sliding_window: u32,
    pub page_weight: u32,
    pub row_weight: u32,
    pub unit_weight: u32,
    pub split: u32,
    pub places: u32,
    pub blocks_launched: u32,
    pub scale: f32,
    pub softcap: f32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvAttend"][::core::mem::size_of::<QkvAttend>() - 504usize];
    ["Alignment of QkvAttend"][::core::mem::align_of::<QkvAttend>() - 8usize];
    ["Offset of field: QkvAttend::q"][::core::mem::offset_of!(QkvAttend, q) - 0usize];
    ["Offset of field: QkvAttend::out"][::core::mem::offset_of!(QkvAttend, out) - 72usize];
    ["Offset of field: QkvAttend::format"][::core::mem::offset_of!(QkvAttend, format) - 144usize];
    ["Offset of field: QkvAttend::at"][::core::mem::offset_of!(QkvAttend, at) - 240usize];
    ["Offset of field: QkvAttend::window"][::core::mem::offset_of!(QkvAttend, window) - 304usize];
    ["Offset of field: QkvAttend::sink"][::core::mem::offset_of!(QkvAttend, sink) - 320usize];
    ["Offset of field: QkvAttend::scales"][::core::mem::offset_of!(QkvAttend, scales) - 336usize];
    ["Offset of field: QkvAttend::means"][::core::mem::offset_of!(QkvAttend, means) - 352usize];
    ["Offset of field: QkvAttend::pages"][::core::mem::offset_of!(QkvAttend, pages) - 360usize];
    ["Offset of field: QkvAttend::step"][::core::mem::offset_of!(QkvAttend, step) - 368usize];
    ["Offset of field: QkvAttend::block_tables"][::core::mem::offset_of!(QkvAttend, block_tables) - 376usize];
    ["Offset of field: QkvAttend::lse"][::core::mem::offset_of!(QkvAttend, lse) - 384usize];
    ["Offset of field: QkvAttend::sink_logits"][::core::mem::offset_of!(QkvAttend, sink_logits) - 392usize];
    ["Offset of field: QkvAttend::workspace"][::core::mem::offset_of!(QkvAttend, workspace) - 400usize];
    ["Offset of field: QkvAttend::status"][::core::mem::offset_of!(QkvAttend, status) - 408usize];
    ["Offset of field: QkvAttend::heads"][::core::mem::offset_of!(QkvAttend, heads) - 416usize];
    ["Offset of field: QkvAttend::group"][::core::mem::offset_of!(QkvAttend, group) - 420usize];
    ["Offset of field: QkvAttend::sequences"][::core::mem::offset_of!(QkvAttend, sequences) - 424usize];
    ["Offset of field: QkvAttend::table_width"][::core::mem::offset_of!(QkvAttend, table_width) - 428usize];
    ["Offset of field: QkvAttend::blocks"][::core::mem::offset_of!(QkvAttend, blocks) - 432usize];
    ["Offset of field: QkvAttend::page_bytes"][::core::mem::offset_of!(QkvAttend, page_bytes) - 436usize];
    ["Offset of field: QkvAttend::window_rows"][::core::mem::offset_of!(QkvAttend, window_rows) - 440usize];
    ["Offset of field: QkvAttend::sinks"][::core::mem::offset_of!(QkvAttend, sinks) - 444usize];
    ["Offset of field: QkvAttend::window_dtype"][::core::mem::offset_of!(QkvAttend, window_dtype) - 448usize];
    ["Offset of field: QkvAttend::direct"][::core::mem::offset_of!(QkvAttend, direct) - 452usize];
    ["Offset of field: QkvAttend::max_query"][::core::mem::offset_of!(QkvAttend, max_query) - 456usize];
    ["Offset of field: QkvAttend::columns"][::core::mem::offset_of!(QkvAttend, columns) - 460usize];
    ["Offset of field: QkvAttend::column_blocks"]
        [::core::mem::offset_of!(QkvAttend, column_blocks) - 464usize];
    ["Offset of field: QkvAttend::sliding_window"]
        [::core::mem::offset_of!(QkvAttend, sliding_window) - 468usize];
    ["Offset of field: QkvAttend::page_weight"][::core::mem::offset_of!(QkvAttend, page_weight) - 472usize];
    ["Offset of field: QkvAttend::row_weight"][::core::mem::offset_of!(QkvAttend, row_weight) - 476usize];
    ["Offset of field: QkvAttend::unit_weight"][::core::mem::offset_of!(QkvAttend, unit_weight) - 480usize];
    ["Offset of field: QkvAttend::split"][::core::mem::offset_of!(QkvAttend, split) - 484usize];
    ["Offset of field: QkvAttend::places"][::core::mem::offset_of!(QkvAttend, places) - 488usize];
    ["Offset of field: QkvAttend::blocks_launched"]
        [::core::mem::offset_of!(QkvAttend, blocks_launched) - 492usize];
    ["Offset of field: QkvAttend::scale"][::core::mem::offset_of!(QkvAttend, scale) - 496usize];
    ["Offset of field: QkvAttend::softcap"][::core::mem::offset_of!(QkvAttend, softcap) - 500usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvCheckLayout {
    pub format: QkvFormat,
    pub at: QkvOperand,
    pub bits: u64,
    pub pairs: u64,
    pub order: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvCheckLayout"][::core::mem::size_of::<QkvCheckLayout>() - 104usize];
    ["Alignment of QkvCheckLayout"][::core::mem::align_of::<QkvCheckLayout>() - 8usize];
    ["Offset of field: QkvCheckLayout::format"][::core::mem::offset_of!(QkvCheckLayout, format) - 0usize];
    ["Offset of field: QkvCheckLayout::at"][::core::mem::offset_of!(QkvCheckLayout, at) - 48usize];
    ["Offset of field: QkvCheckLayout::bits"][::core::mem::offset_of!(QkvCheckLayout, bits) - 80usize];
    ["Offset of field: QkvCheckLayout::pairs"][::core::mem::offset_of!(QkvCheckLayout, pairs) - 88usize];
    ["Offset of field: QkvCheckLayout::order"][::core::mem::offset_of!(QkvCheckLayout, order) - 96usize];
    ["Offset of field: QkvCheckLayout::reserved"]
        [::core::mem::offset_of!(QkvCheckLayout, reserved) - 100usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvCheckMma {
    pub a: u64,
    pub b: u64,
    pub d: u64,
    pub tiles: u64,
    pub kind: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvCheckMma"][::core::mem::size_of::<QkvCheckMma>() - 40usize];
    ["Alignment of QkvCheckMma"][::core::mem::align_of::<QkvCheckMma>() - 8usize];
    ["Offset of field: QkvCheckMma::a"][::core::mem::offset_of!(QkvCheckMma, a) - 0usize];
    ["Offset of field: QkvCheckMma::b"][::core::mem::offset_of!(QkvCheckMma, b) - 8usize];
    ["Offset of field: QkvCheckMma::d"][::core::mem::offset_of!(QkvCheckMma, d) - 16usize];
    ["Offset of field: QkvCheckMma::tiles"][::core::mem::offset_of!(QkvCheckMma, tiles) - 24usize];
    ["Offset of field: QkvCheckMma::kind"][::core::mem::offset_of!(QkvCheckMma, kind) - 32usize];
    ["Offset of field: QkvCheckMma::reserved"][::core::mem::offset_of!(QkvCheckMma, reserved) - 36usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvMergeStates {
    pub out: QkvTensor,
    pub other: QkvTensor,
    pub lse: u64,
    pub other_lse: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvMergeStates"][::core::mem::size_of::<QkvMergeStates>() - 160usize];
    ["Alignment of QkvMergeStates"][::core::mem::align_of::<QkvMergeStates>() - 8usize];
    ["Offset of field: QkvMergeStates::out"][::core::mem::offset_of!(QkvMergeStates, out) - 0usize];
    ["Offset of field: QkvMergeStates::other"][::core::mem::offset_of!(QkvMergeStates, other) - 72usize];
    ["Offset of field: QkvMergeStates::lse"][::core::mem::offset_of!(QkvMergeStates, lse) - 144usize];
    ["Offset of field: QkvMergeStates::other_lse"]
        [::core::mem::offset_of!(QkvMergeStates, other_lse) - 152usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvPrefill {
    pub q: QkvTensor,
    pub input: [QkvTensor; 2usize],
    pub out: QkvTensor,
    pub format: [QkvFormat; 2usize],
    pub at: [QkvOperand; 2usize],
    pub window: [u64; 2usize],
    pub sink: [u64; 2usize],
    pub scales: [u64; 2usize],
    pub means: u64,
    pub pages: u64,
    pub step: u64,
    pub block_tables: u64,
    pub status: u64,
    pub lse: u64,
    pub sink_logits: u64,
    pub bidirectional: u64,
    pub heads: u32,
    pub sequences: u32,
    pub rows: u32,
    pub table_width: u32,
    pub blocks: u32,
    pub page_bytes: u32,
    pub window_rows: u32,
    pub sinks: u32,
    pub window_dtype: u32,
    pub group: u32,
    pub ranges: u32,
    pub sliding_window: u32,
    pub max_query_len: u32,
    pub row_blocks: u32,
    pub decoded_pages: u32,
    pub input_rows: u32,
    pub scale: f32,
    pub softcap: f32,
    pub decoded: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvPrefill"][::core::mem::size_of::<QkvPrefill>() - 640usize];
    ["Alignment of QkvPrefill"][::core::mem::align_of::<QkvPrefill>() - 8usize];
    ["Offset of field: QkvPrefill::q"][::core::mem::offset_of!(QkvPrefill, q) - 0usize];
    ["Offset of field: QkvPrefill::input"][::core::mem::offset_of!(QkvPrefill, input) - 72usize];
    ["Offset of field: QkvPrefill::out"][::core::mem::offset_of!(QkvPrefill, out) - 216usize];
    ["Offset of field: QkvPrefill::format"][::core::mem::offset_of!(QkvPrefill, format) - 288usize];
    ["Offset of field: QkvPrefill::at"][::core::mem::offset_of!(QkvPrefill, at) - 384usize];
    ["Offset of field: QkvPrefill::window"][::core::mem::offset_of!(QkvPrefill, window) - 448usize];
    ["Offset of field: QkvPrefill::sink"][::core::mem::offset_of!(QkvPrefill, sink) - 464usize];
    ["Offset of field: QkvPrefill::scales"][::core::mem::offset_of!(QkvPrefill, scales) - 480usize];
    ["Offset of field: QkvPrefill::means"][::core::mem::offset_of!(QkvPrefill, means) - 496usize];
    ["Offset of field: QkvPrefill::pages"][::core::mem::offset_of!(QkvPrefill, pages) - 504usize];
    ["Offset of field: QkvPrefill::step"][::core::mem::offset_of!(QkvPrefill, step) - 512usize];
    ["Offset of field: QkvPrefill::block_tables"]
        [::core::mem::offset_of!(QkvPrefill, block_tables) - 520usize];
    ["Offset of field: QkvPrefill::status"][::core::mem::offset_of!(QkvPrefill, status) - 528usize];
    ["Offset of field: QkvPrefill::lse"][::core::mem::offset_of!(QkvPrefill, lse) - 536usize];
    ["Offset of field: QkvPrefill::sink_logits"][::core::mem::offset_of!(QkvPrefill, sink_logits) - 544usize];
    ["Offset of field: QkvPrefill::bidirectional"]
        [::core::mem::offset_of!(QkvPrefill, bidirectional) - 552usize];
    ["Offset of field: QkvPrefill::heads"][::core::mem::offset_of!(QkvPrefill, heads) - 560usize];
    ["Offset of field: QkvPrefill::sequences"][::core::mem::offset_of!(QkvPrefill, sequences) - 564usize];
    ["Offset of field: QkvPrefill::rows"][::core::mem::offset_of!(QkvPrefill, rows) - 568usize];
    ["Offset of field: QkvPrefill::table_width"][::core::mem::offset_of!(QkvPrefill, table_width) - 572usize];
    ["Offset of field: QkvPrefill::blocks"][::core::mem::offset_of!(QkvPrefill, blocks) - 576usize];
    ["Offset of field: QkvPrefill::page_bytes"][::core::mem::offset_of!(QkvPrefill, page_bytes) - 580usize];
    ["Offset of field: QkvPrefill::window_rows"][::core::mem::offset_of!(QkvPrefill, window_rows) - 584usize];
    ["Offset of field: QkvPrefill::sinks"][::core::mem::offset_of!(QkvPrefill, sinks) - 588usize];
    ["Offset of field: QkvPrefill::window_dtype"]
        [::core::mem::offset_of!(QkvPrefill, window_dtype) - 592usize];
    ["Offset of field: QkvPrefill::group"][::core::mem::offset_of!(QkvPrefill, group) - 596usize];
    ["Offset of field: QkvPrefill::ranges"][::core::mem::offset_of!(QkvPrefill, ranges) - 600usize];
    ["Offset of field: QkvPrefill::sliding_window"]
        [::core::mem::offset_of!(QkvPrefill, sliding_window) - 604usize];
    ["Offset of field: QkvPrefill::max_query_len"]
        [::core::mem::offset_of!(QkvPrefill, max_query_len) - 608usize];
    ["Offset of field: QkvPrefill::row_blocks"][::core::mem::offset_of!(QkvPrefill, row_blocks) - 612usize];
    ["Offset of field: QkvPrefill::decoded_pages"]
        [::core::mem::offset_of!(QkvPrefill, decoded_pages) - 616usize];
    ["Offset of field: QkvPrefill::input_rows"][::core::mem::offset_of!(QkvPrefill, input_rows) - 620usize];
    ["Offset of field: QkvPrefill::scale"][::core::mem::offset_of!(QkvPrefill, scale) - 624usize];
    ["Offset of field: QkvPrefill::softcap"][::core::mem::offset_of!(QkvPrefill, softcap) - 628usize];
    ["Offset of field: QkvPrefill::decoded"][::core::mem::offset_of!(QkvPrefill, decoded) - 632usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvStream {
    pub from: u64,
    pub to: u64,
    pub vectors: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvStream"][::core::mem::size_of::<QkvStream>() - 24usize];
    ["Alignment of QkvStream"][::core::mem::align_of::<QkvStream>() - 8usize];
    ["Offset of field: QkvStream::from"][::core::mem::offset_of!(QkvStream, from) - 0usize];
    ["Offset of field: QkvStream::to"][::core::mem::offset_of!(QkvStream, to) - 8usize];
    ["Offset of field: QkvStream::vectors"][::core::mem::offset_of!(QkvStream, vectors) - 16usize];
};
#[repr(C)]
#[derive(Debug, Default, Copy, Clone)]
pub struct QkvPlainAppend {
    pub from: [u64; 2usize],
    pub to: [u64; 2usize],
    pub slot_mapping: u64,
    pub slots: u64,
    pub row_vectors: [u32; 2usize],
    pub rows: u32,
    pub reserved: u32,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of QkvPlainAppend"][::core::mem::size_of::<QkvPlainAppend>() - 64usize];
    ["Alignment of QkvPlainAppend"][::core::mem::align_of::<QkvPlainAppend>() - 8usize];
    ["Offset of field: QkvPlainAppend::from"][::core::mem::offset_of!(QkvPlainAppend, from) - 0usize];
    ["Offset of field: QkvPlainAppend::to"][::core::mem::offset_of!(QkvPlainAppend, to) - 16usize];
    ["Offset of field: QkvPlainAppend::slot_mapping"]
        [::core::mem::offset_of!(QkvPlainAppend, slot_mapping) - 32usize];
    ["Offset of field: QkvPlainAppend::slots"][::core::mem::offset_of!(QkvPlainAppend, slots) - 40usize];
    ["Offset of field: QkvPlainAppend::row_vectors"]
        [::core::mem::offset_of!(QkvPlainAppend, row_vectors) - 48usize];
    ["Offset of field: QkvPlainAppend::rows"][::core::mem::offset_of!(QkvPlainAppend, rows) - 56usize];
    ["Offset of field: QkvPlainAppend::reserved"]
        [::core::mem::offset_of!(QkvPlainAppend, reserved) - 60usize];
};
