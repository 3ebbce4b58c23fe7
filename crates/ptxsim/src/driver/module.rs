//! Modules: from what the caller has in memory or in a file to an image on the card.

use super::error::{Code, Failure, Outcome, fail, invalid};
use super::host;
use super::state::{Device, Kind, State, driver};
use crate::fatbin::{self, FatbinError};
use crate::program::Image;
use crate::ptx;
use std::collections::HashMap;
use std::sync::Arc;

/// Newest `.version` that is accepted, as the driver's version implies.
const NEWEST_PTX: (u32, u32) = (9, 5);
/// Longest PTX text.
const LONGEST_TEXT: usize = 1 << 30;
/// Longest fatbin.
const LONGEST_FATBIN: usize = 2 << 30;

const FATBIN: u32 = 0xba55_ed50;
/// `__fatBinC_Wrapper_t`: magic, version, pointer to a fatbin.
const WRAPPER: u32 = 0x4662_43b1;
const ELF: u32 = u32::from_le_bytes(*b"\x7fELF");

/// A module.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) context: u64,
    pub(crate) image: Arc<Image>,
    /// Functions that were asked for, by name.
    pub(crate) functions: HashMap<String, u64>,
    /// Registers of kernels, from a cubin for the card's generation.
    pub(crate) registers: HashMap<String, u32>,
}

impl State {
    /// A module by its handle.
    pub(crate) fn module(&self, handle: u64) -> Outcome<&Module> {
        self.usable()?;
        match self.modules.get(&handle) {
            Some(module) => Ok(module),
            None => fail(Code::InvalidHandle, format!("{handle:#x} is no module, or one that was unloaded")),
        }
    }
}

/// PTX and what a cubin beside it says.
#[derive(Debug)]
struct Text {
    ptx: String,
    registers: HashMap<String, u32>,
}

fn utf8(bytes: Vec<u8>) -> Outcome<Text> {
    match String::from_utf8(bytes) {
        Ok(ptx) => Ok(Text { ptx, registers: HashMap::new() }),
        Err(_) => fail(Code::InvalidImage, "the image is neither a fatbin nor PTX text"),
    }
}

/// An image of unknown length.
fn from_memory(address: usize, cc: u32) -> Outcome<Text> {
    match host::get::<u32>(address) {
        Ok(WRAPPER) => {
            let inner = host::get::<usize>(address.wrapping_add(8))?;
            match host::get::<u32>(inner)? {
                FATBIN => fatbin_in_memory(inner, cc),
                other => fail(Code::InvalidImage, format!("a fatbin wrapper around magic {other:#x}")),
            }
        }
        Ok(FATBIN) => fatbin_in_memory(address, cc),
        Ok(ELF) => cubin(),
        // A text may be shorter than a magic.
        _ => utf8(host::text(address, LONGEST_TEXT)?),
    }
}

fn fatbin_in_memory(address: usize, cc: u32) -> Outcome<Text> {
    let mut header = [0; 16];
    host::read(address, &mut header)?;
    match fatbin::total_len(&header).filter(|len| *len <= LONGEST_FATBIN) {
        Some(len) => from_fatbin(&host::bytes(address, len)?, cc),
        None => fail(Code::InvalidImage, "the header of the fatbin is damaged"),
    }
}

/// An image from a file.
fn from_bytes(bytes: Vec<u8>, cc: u32) -> Outcome<Text> {
    match bytes.first_chunk().map(|b| u32::from_le_bytes(*b)) {
        Some(FATBIN) => from_fatbin(&bytes, cc),
        Some(ELF) => cubin(),
        _ => utf8(bytes.split(|b| *b == 0).next().unwrap_or_default().to_vec()),
    }
}

fn cubin() -> Outcome<Text> {
    fail(
        Code::NoBinaryForGpu,
        "a cubin holds machine code of a real card; give PTX, or a fatbin that holds PTX too \
         (nvcc -fatbin -gencode arch=compute_80,code=[sm_80,compute_80])",
    )
}

fn from_fatbin(bytes: &[u8], cc: u32) -> Outcome<Text> {
    let refused = |error: FatbinError| {
        let code = match error {
            FatbinError::Malformed(_) => Code::InvalidImage,
            FatbinError::NoPtx(_) | FatbinError::NoSuitable(..) => Code::NoBinaryForGpu,
        };
        Failure { code, reason: error.to_string() }
    };
    let entries = fatbin::entries(bytes).map_err(refused)?;
    let ptx = fatbin::select_ptx(&entries, cc).map_err(refused)?;
    Ok(Text { ptx, registers: fatbin::registers_for(&entries, cc) })
}

/// Parses PTX and checks that the card and this driver take it.
fn parse(text: &str, cc: u32) -> Outcome<ptx::ast::Module> {
    let module = ptx::parse(text).map_err(|e| Failure { code: Code::InvalidPtx, reason: e.to_string() })?;
    let (major, minor) = module.version;
    if module.version > NEWEST_PTX {
        return fail(
            Code::UnsupportedPtxVersion,
            format!("PTX {major}.{minor}; {}.{} is the newest supported", NEWEST_PTX.0, NEWEST_PTX.1),
        );
    }
    if !module.target.runs_on(cc) {
        return fail(
            Code::NoBinaryForGpu,
            format!(
                "the PTX is for sm_{}, the card is sm_{cc}: compile for compute_{cc} or an older architecture, or \
                 choose another card",
                module.target
            ),
        );
    }
    if module.address_size == 32 {
        return fail(Code::InvalidPtx, ".address_size 32: only 64-bit PTX runs");
    }
    Ok(module)
}

fn load(out: usize, name: &str, read: impl FnOnce(u32) -> Outcome<Text>) -> Outcome {
    host::need(out)?;
    let (context, device) = {
        let mut guard = driver().lock();
        let context = guard.usable()?;
        guard.refuse_unsafe(name)?;
        (context, guard.device_of(context)?)
    };
    // Without the lock: texts can be long.
    let Text { ptx, registers } = read(device.card.cc)?;
    let module = parse(&ptx, device.card.cc)?;
    let image = place(module, &device)?;
    let mut guard = driver().lock();
    if let Err(failure) = guard.check(context) {
        image.unload(&device.memory);
        return Err(failure);
    }
    let handle = guard.handle(Kind::Module);
    host::put(out, handle)?;
    guard
        .modules
        .insert(handle, Module { context, image: Arc::new(image), functions: HashMap::new(), registers });
    Ok(())
}

fn place(module: ptx::ast::Module, device: &Device) -> Outcome<Image> {
    Image::load(Arc::new(module), &device.memory).map_err(|reason| Failure { code: Code::InvalidPtx, reason })
}

/// `CUjit_option`: where the caller wants to read what went wrong.
#[derive(Debug, Default)]
struct Log {
    buffer: usize,
    bytes: usize,
    /// Where the number of bytes written goes: the option's value itself.
    length: usize,
}

impl Log {
    fn of(count: u32, options: usize, values: usize) -> Outcome<Self> {
        let mut log = Self::default();
        for i in 0..count.min(64) as usize {
            let option = host::get::<i32>(options.wrapping_add(4 * i))?;
            let value = values.wrapping_add(8 * i);
            match option {
                5 => log.buffer = host::get(value)?,
                6 => (log.bytes, log.length) = (host::get::<u32>(value)? as usize, value),
                _ => {}
            }
        }
        Ok(log)
    }

    fn write(&self, text: &str) -> Outcome {
        if self.buffer != 0 && self.bytes > 0 {
            let n = text.len().min(self.bytes - 1);
            host::write(self.buffer, &text.as_bytes()[..n])?;
            host::write(self.buffer + n, &[0])?;
            host::put(self.length, n as u32)?;
        }
        Ok(())
    }
}

api! {
    fn cuModuleLoadData(out: usize, image: usize) {
        load(out, "cuModuleLoadData", |cc| from_memory(image, cc))
    }
    fn cuModuleLoadDataEx(out: usize, image: usize, count: u32, options: usize, values: usize) {
        let log = Log::of(count, options, values)?;
        let outcome = load(out, "cuModuleLoadDataEx", |cc| from_memory(image, cc));
        if let Err(failure) = &outcome {
            log.write(&failure.reason)?;
        }
        outcome
    }
    fn cuModuleLoadFatBinary(out: usize, image: usize) {
        load(out, "cuModuleLoadFatBinary", |cc| from_memory(image, cc))
    }
    fn cuModuleLoad(out: usize, path: usize) {
        let path = host::name(path)?;
        load(out, "cuModuleLoad", |cc| match crate::files::read(path.as_ref()) {
            Ok(bytes) => from_bytes(bytes, cc),
            Err(error) => fail(Code::FileNotFound, format!("{path}: {error}")),
        })
    }
    fn cuModuleUnload(handle: u64) {
        let mut guard = driver().lock();
        let context = guard.module(handle)?.context;
        guard.refuse_unsafe("cuModuleUnload")?;
        // Kernels that were launched finish.
        let rest = guard.unfinished(context);
        guard = driver().finish_all(guard, &rest);
        guard.check(context)?;
        let device = guard.device_of(context)?;
        if let Some(module) = guard.modules.remove(&handle) {
            module.image.unload(&device.memory);
            guard.functions.retain(|_, f| f.module != handle);
        }
        Ok(())
    }
    fn cuModuleGetGlobal_v2(address: usize, bytes: usize, handle: u64, name: usize) {
        if address == 0 && bytes == 0 {
            return invalid("neither address nor size is asked for");
        }
        let name = host::name(name)?;
        let guard = driver().lock();
        match guard.module(handle)?.image.variables.get(&name) {
            Some((base, len)) => {
                host::put_if(address, *base)?;
                host::put_if(bytes, *len)
            }
            None => fail(Code::NotFound, format!("the module has no variable {name}")),
        }
    }
    fn cuModuleGetLoadingMode(out: usize) {
        // lazy
        host::put(out, 2i32)
    }
}
