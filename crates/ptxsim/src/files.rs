//! Files that others name.

use std::io::{Error, ErrorKind, Read, Result};
use std::path::Path;

/// What a stream may hold: more than any image. Regular files may be as long as they are.
const LONGEST_STREAM: u64 = 1 << 30;

/// All bytes of a file. A device that never ends is an error.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    let file = std::fs::File::open(path)?;
    let about = file.metadata()?;
    let limit = if about.is_file() { about.len().max(LONGEST_STREAM) } else { LONGEST_STREAM };
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("longer than {limit} bytes")));
    }
    Ok(bytes)
}
