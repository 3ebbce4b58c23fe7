//! The fat binaries that the build script made of `kernels/*.cu`.

/// One source's kernels, for all architectures of the build.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Image {
    /// Name of the source.
    pub(crate) name: &'static str,
    /// The fat binary.
    pub(crate) bytes: &'static [u8],
}

/// All of them; none where the documentation was built without nvcc.
pub(crate) static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));
