//! Two devices in one process: launches refuse what is known to belong to the other.

use cudarc::driver::CudaContext;
use ptxsim::testing::ensure_driver;
use qkv::cuda::launch::{CodeOrder, quantize};
use qkv::cuda::{CacheStream, Cuda, Device, DeviceSlice, DeviceTensor, RawStream};
use qkv::{Affine, Bits, CacheConfig, Error, KvCache};

#[test]
fn memory_and_streams_of_another_device_are_refused() {
    // SAFETY: the only test of this program, before anything else runs.
    unsafe { std::env::set_var("PTXSIM_CC", "80,80") };
    ensure_driver();
    let Ok(other) = Device::new(1) else {
        eprintln!("one device only; nothing is tested");
        return;
    };
    assert!(matches!(Device::new(99), Err(Error::OutOfRange { what: "device", .. })));
    let at = |ordinal| CudaContext::new(ordinal).unwrap().new_stream().unwrap();
    let (here, there) = (at(0), at(1));
    let x = here.clone_htod(&[1f32; 128]).unwrap();
    let (mut codes, mut pairs) =
        (there.clone_htod(&[9u8; 64]).unwrap(), there.clone_htod(&[9u32; 4]).unwrap());
    let f = Affine::per_token(Bits::B4, 32);
    let near = there.clone_htod(&[1f32; 128]).unwrap();
    assert_eq!(DeviceSlice::from(&near).device(), Some(1));

    let view = DeviceTensor::thd(&x, [1, 1, 128]).unwrap();
    let (c, p) = ((&mut codes).into(), (&mut pairs).into());
    let got = quantize(&other, RawStream::from(&*there), &view, &f, CodeOrder::Rows, c, p, None);
    assert!(matches!(got, Err(Error::Unsupported { what: "x", .. })), "{got:?}");
    let text = got.unwrap_err().to_string();
    assert!(text.contains("memory of device 0") && text.contains("on device 1"), "{text}");

    let view = DeviceTensor::thd(&near, [1, 1, 128]).unwrap();
    let (c, p) = ((&mut codes).into(), (&mut pairs).into());
    let got = quantize(&other, RawStream::from(&*here), &view, &f, CodeOrder::Rows, c, p, None);
    assert!(matches!(got, Err(Error::Cuda { what: "a launch", .. })), "{got:?}");
    assert_eq!(there.clone_dtoh(&codes).unwrap(), [9u8; 64]);

    // A cache's stream, and what its steps are given.
    let config = CacheConfig::new(1, 1, 64).with_capacity(1, 64);
    let foreign = || {
        // SAFETY: the stream lives until the end of this test.
        unsafe { CacheStream::from_raw(here.cu_stream().cast()) }
    };
    let got = KvCache::<Cuda>::on_device(&other, foreign(), config.clone());
    assert!(matches!(got, Err(Error::Unsupported { what: "stream", .. })), "{got:?}");
    let got = KvCache::<Cuda>::on_device(&other, here.clone(), config.clone());
    assert!(matches!(got, Err(Error::Unsupported { what: "stream", .. })), "{got:?}");
    let mut cache = KvCache::<Cuda>::on_device(&other, there.clone(), config).unwrap();
    assert!(matches!(cache.set_stream(foreign()), Err(Error::Unsupported { what: "stream", .. })));
    let tokens = |x| DeviceTensor::thd(x, [1, 1, 64]).unwrap();
    let (far, near) = (here.clone_htod(&[1f32; 64]).unwrap(), there.clone_htod(&[1f32; 64]).unwrap());
    cache.append(0, &tokens(&near), &tokens(&near)).unwrap();
    let step = format!("{:?}", cache.paged().step());
    let got = cache.append(0, &tokens(&near), &tokens(&far));
    assert!(matches!(got, Err(Error::Unsupported { what: "v", .. })), "{got:?}");
    assert_eq!(format!("{:?}", cache.paged().step()), step);
    // SAFETY: as above.
    cache.set_stream(unsafe { CacheStream::from_raw(there.cu_stream().cast()) }).unwrap();
    cache.append(0, &tokens(&near), &tokens(&near)).unwrap();
    assert_eq!(cache.len(0), 2);

    let (c, p) = ((&mut codes).into(), (&mut pairs).into());
    quantize(&other, RawStream::from(&*there), &view, &f, CodeOrder::Rows, c, p, None).unwrap();
    assert_eq!(there.clone_dtoh(&codes).unwrap(), [0u8; 64]);
}
