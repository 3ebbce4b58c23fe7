//! Kernels and their attributes.

use super::error::{Code, Failure, Outcome, fail, invalid};
use super::host;
use super::occupancy;
use super::state::{Device, Kind, State, driver};
use crate::card::{SHARED_PER_BLOCK, THREADS_PER_BLOCK};
use crate::options::Options;
use crate::program::{Image, Kernel, LoadError};
use std::sync::Arc;

/// A kernel of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) context: u64,
    pub(crate) module: u64,
    pub(crate) name: String,
    pub(crate) device: Arc<Device>,
    image: Arc<Image>,
    kernel: Arc<Kernel>,
    /// The options that `kernel` was decoded with.
    decoded: Options,
    /// Registers of a thread.
    pub(crate) registers: u32,
    /// Set by the caller: largest dynamic shared memory.
    dynamic_shared: Option<u32>,
    carveout: i32,
    /// Clusters of more than 8 blocks.
    pub(crate) large_clusters: bool,
    cluster_policy: i32,
    /// Cluster shape set by the caller; 0 = not.
    cluster: [u32; 3],
}

impl Function {
    /// Largest dynamic shared memory of a launch.
    pub(crate) fn dynamic_limit(&self) -> u32 {
        self.dynamic_shared.unwrap_or(SHARED_PER_BLOCK.saturating_sub(self.kernel.shared_bytes))
    }

    /// Cluster shape that the kernel was compiled for, or that was set.
    pub(crate) fn required_cluster(&self) -> Option<[u32; 3]> {
        self.kernel.limits.cluster.or(self
            .cluster
            .iter()
            .any(|n| *n > 0)
            .then(|| self.cluster.map(|n| n.max(1))))
    }

    /// Threads of a block that it can have.
    pub(crate) fn thread_limit(&self) -> u32 {
        let declared = |d: [u32; 3]| d.iter().fold(1u32, |product, n| product.saturating_mul(*n));
        let by_directive = self.kernel.limits.required_threads.or(self.kernel.limits.max_threads);
        let limit = by_directive.map_or(THREADS_PER_BLOCK, declared).min(THREADS_PER_BLOCK);
        limit.min(occupancy::threads_by_registers(self.registers))
    }

    /// The kernel.
    pub(crate) fn kernel(&self) -> &Arc<Kernel> {
        &self.kernel
    }

    /// The kernel as the options ask for it.
    pub(crate) fn kernel_for(&mut self, options: &Options) -> Outcome<Arc<Kernel>> {
        let wanted = decoding(options);
        if self.decoded != wanted {
            self.kernel = Arc::new(decode(&self.image, &self.name, &self.device, options)?);
            self.decoded = wanted;
        }
        Ok(Arc::clone(&self.kernel))
    }

    fn attribute(&self, attribute: i32) -> Outcome<i32> {
        let required = self.required_cluster().unwrap_or_default();
        Ok(match attribute {
            0 => self.thread_limit() as i32,
            1 => self.kernel.shared_bytes as i32,
            2 => {
                let variables = self.image.module.variables.iter();
                let constant = variables.filter(|v| v.space == crate::ptx::ast::Space::Const);
                constant.map(|v| v.bytes).sum::<u64>() as i32
            }
            3 => self.kernel.local_bytes as i32,
            4 => self.registers as i32,
            5 => self.image.module.target.arch as i32,
            6 => self.device.card.cc as i32,
            7 => 0,
            8 => self.dynamic_limit() as i32,
            9 => self.carveout,
            10 => i32::from(self.kernel.limits.explicit_cluster && self.required_cluster().is_none()),
            11..=13 => required[attribute as usize - 11] as i32,
            14 => i32::from(self.large_clusters),
            15 => self.cluster_policy,
            _ => return invalid(format!("function attribute {attribute}")),
        })
    }

    fn set_attribute(&mut self, attribute: i32, value: i32) -> Outcome {
        match attribute {
            8 => {
                let largest =
                    self.device.card.shared_per_block_optin.saturating_sub(self.kernel.shared_bytes);
                match u32::try_from(value) {
                    Ok(bytes) if bytes <= largest => self.dynamic_shared = Some(bytes),
                    _ => {
                        return invalid(format!(
                            "{value} bytes of dynamic shared memory for {}; the card allows {largest} beside its {} \
                             static ones",
                            self.name, self.kernel.shared_bytes
                        ));
                    }
                }
            }
            9 if (-1..=100).contains(&value) => self.carveout = value,
            11..=13 if self.kernel.limits.cluster.is_none() && value >= 0 => {
                self.cluster[attribute as usize - 11] = value as u32;
            }
            14 if value == 0 || value == 1 => self.large_clusters = value == 1,
            15 if (0..3).contains(&value) => self.cluster_policy = value,
            _ => return invalid(format!("function attribute {attribute} cannot be set to {value}")),
        }
        Ok(())
    }
}

/// The options that matter for decoding, the others at one value.
fn decoding(options: &Options) -> Options {
    Options { shuffle_seed: None, delay_streams: false, threads: 0, instruction_limit: 0, ..*options }
}

fn decode(image: &Image, name: &str, device: &Device, options: &Options) -> Outcome<Kernel> {
    image.kernel(name, device.card, options).map_err(|error| match error {
        LoadError::NotFound(name) => {
            let functions = image.module.functions.iter().filter(|f| f.kernel && !f.declaration);
            let names: Vec<&str> = functions.map(|f| f.name.as_str()).collect();
            Failure {
                code: Code::NotFound,
                reason: format!("the module has no kernel {name}; it has {}", names.join(", ")),
            }
        }
        LoadError::Unsupported(all) => Failure { code: Code::InvalidPtx, reason: all.join("\n  ") },
    })
}

impl State {
    /// A kernel by its handle.
    pub(crate) fn function(&self, handle: u64) -> Outcome<&Function> {
        self.usable()?;
        match self.functions.get(&handle) {
            Some(function) => Ok(function),
            None => {
                fail(Code::InvalidHandle, format!("{handle:#x} is no kernel, or its module was unloaded"))
            }
        }
    }

    /// The same, to change it.
    pub(crate) fn function_mut(&mut self, handle: u64) -> Outcome<&mut Function> {
        self.function(handle)?;
        match self.functions.get_mut(&handle) {
            Some(function) => Ok(function),
            None => Err(Code::InvalidHandle.into()),
        }
    }
}

api! {
    fn cuModuleGetFunction(out: usize, handle: u64, name: usize) {
        host::need(out)?;
        let name = host::name(name)?;
        let (image, device, context, options, cubin) = {
            let guard = driver().lock();
            let module = guard.module(handle)?;
            if let Some(known) = module.functions.get(&name) {
                return host::put(out, *known);
            }
            let registers = module.registers.get(&name).copied();
            (Arc::clone(&module.image), guard.device_of(module.context)?, module.context, guard.options(), registers)
        };
        // Without the lock: kernels can be long.
        let kernel = decode(&image, &name, &device, &options)?;
        let mut guard = driver().lock();
        guard.module(handle)?;
        let function = Function {
            context,
            module: handle,
            name: name.clone(),
            device,
            registers: cubin.unwrap_or(kernel.estimated_registers),
            image,
            kernel: Arc::new(kernel),
            decoded: decoding(&options),
            dynamic_shared: None,
            carveout: -1,
            large_clusters: false,
            cluster_policy: 0,
            cluster: [0; 3],
        };
        let new = guard.handle(Kind::Function);
        host::put(out, new)?;
        guard.functions.insert(new, function);
        if let Some(module) = guard.modules.get_mut(&handle) {
            module.functions.insert(name, new);
        }
        Ok(())
    }
    fn cuModuleGetFunctionCount(out: usize, handle: u64) {
        let guard = driver().lock();
        let functions = &guard.module(handle)?.image.module.functions;
        host::put(out, functions.iter().filter(|f| f.kernel).count() as u32)
    }
    fn cuFuncGetAttribute(out: usize, attribute: i32, handle: u64) {
        host::need(out)?;
        let guard = driver().lock();
        host::put(out, guard.function(handle)?.attribute(attribute)?)
    }
    fn cuFuncSetAttribute(handle: u64, attribute: i32, value: i32) {
        driver().lock().function_mut(handle)?.set_attribute(attribute, value)
    }
    fn cuFuncSetCacheConfig(handle: u64, config: i32) {
        if !(0..4).contains(&config) {
            return invalid(format!("cache configuration {config}"));
        }
        driver().lock().function(handle).map(drop)
    }
    fn cuFuncGetModule(out: usize, handle: u64) {
        let guard = driver().lock();
        host::put(out, guard.function(handle)?.module)
    }
    fn cuFuncIsLoaded(out: usize, handle: u64) {
        let guard = driver().lock();
        guard.function(handle)?;
        host::put(out, 1i32)
    }
    fn cuFuncLoad(handle: u64) {
        driver().lock().function(handle).map(drop)
    }
    fn cuFuncGetParamInfo(handle: u64, index: usize, offset: usize, bytes: usize) {
        let guard = driver().lock();
        match guard.function(handle)?.kernel.params.get(index) {
            Some((at, len)) => {
                host::put(offset, *at)?;
                host::put_if(bytes, *len)
            }
            None => invalid(format!("parameter {index}")),
        }
    }
}
