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
