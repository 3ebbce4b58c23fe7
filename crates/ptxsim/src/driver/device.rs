//! Devices and their attributes.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::state::driver;
use crate::card::{Card, REGISTERS_PER_SM, SHARED_PER_BLOCK, SHARED_RESERVED, THREADS_PER_BLOCK};

/// A `CUdevice_attribute` of a card; 0 for what a simulated one does not have.
fn attribute(card: &Card, attribute: i32) -> Outcome<i32> {
    let hopper = i32::from(card.cc >= 90);
    let value = match attribute {
        1..=3 => THREADS_PER_BLOCK as i32,
        4 => 64,
        5 => i32::MAX,
        6 | 7 => 65_535,
        8 => SHARED_PER_BLOCK as i32,
        9 => 64 << 10,
        10 => 32,
        11 => i32::MAX,
        12 | 82 => REGISTERS_PER_SM as i32,
        13 => card.clock_khz as i32,
        14 => 512,
        15 => 1,
        16 => card.sms as i32,
        // mapped host memory, ECC, integrated: no
        17..=20 => 0,
        30 => 512,
        31 => 1,
        32 => 0,
        33..=35 => 0,
        36 => card.memory_clock_khz as i32,
        37 => card.bus_bits as i32,
        38 => card.l2_bytes as i32,
        39 => card.threads_per_sm as i32,
        40 => 2,
        41 => 1,
        51 => 32,
        75 => (card.cc / 10) as i32,
        76 => (card.cc % 10) as i32,
        78..=80 => 1,
        81 => card.shared_per_sm as i32,
        87 => {
            if card.cc == 80 || card.cc == 90 {
                2
            } else {
                64
            }
        }
        90 => 1,
        95 => 1,
        97 => card.shared_per_block_optin as i32,
        106 => card.blocks_per_sm as i32,
        111 => SHARED_RESERVED as i32,
        115 => 1,
        120 | 127 => hopper,
        129 => 1,
        known if (1..148).contains(&known) => 0,
        _ => return invalid(format!("device attribute {attribute}")),
    };
    Ok(value)
}

/// A UUID that tells cards and ordinals apart.
fn uuid(card: &Card, ordinal: usize) -> [u8; 16] {
    let mut id = *b"ptxsim\0\0\0\0\0\0\0\0\0\0";
    id[8..12].copy_from_slice(&card.cc.to_le_bytes());
    id[12..].copy_from_slice(&(ordinal as u32).to_le_bytes());
    id
}

api! {
    fn cuDeviceGet(out: usize, ordinal: i32) {
        host::need(out)?;
        driver().lock().device(ordinal)?;
        host::put(out, ordinal)
    }
    fn cuDeviceGetCount(out: usize) {
        let guard = driver().lock();
        guard.started()?;
        host::put(out, guard.devices.len() as i32)
    }
    fn cuDeviceGetName(out: usize, len: i32, ordinal: i32) {
        let device = driver().lock().device(ordinal)?;
        let Some(room) = usize::try_from(len).ok().and_then(|n| n.checked_sub(1)) else {
            return invalid(format!("room for {len} bytes"));
        };
        let name = device.card.name.as_bytes();
        let mut text = name[..name.len().min(room)].to_vec();
        text.push(0);
        host::write(out, &text)
    }
    fn cuDeviceGetUuid(out: usize, ordinal: i32) {
        let device = driver().lock().device(ordinal)?;
        host::write(out, &uuid(device.card, device.ordinal))
    }
    fn cuDeviceGetUuid_v2(out: usize, ordinal: i32) {
        let device = driver().lock().device(ordinal)?;
        host::write(out, &uuid(device.card, device.ordinal))
    }
    fn cuDeviceTotalMem_v2(out: usize, ordinal: i32) {
        let device = driver().lock().device(ordinal)?;
        host::put(out, device.memory.capacity())
    }
    fn cuDeviceGetAttribute(out: usize, which: i32, ordinal: i32) {
        host::need(out)?;
        let device = driver().lock().device(ordinal)?;
        host::put(out, attribute(device.card, which)?)
    }
    fn cuDeviceComputeCapability(major: usize, minor: usize, ordinal: i32) {
        let device = driver().lock().device(ordinal)?;
        host::put(major, (device.card.cc / 10) as i32)?;
        host::put(minor, (device.card.cc % 10) as i32)
    }
    fn cuDeviceCanAccessPeer(out: usize, ordinal: i32, peer: i32) {
        let guard = driver().lock();
        guard.device(ordinal)?;
        guard.device(peer)?;
        host::put(out, 0i32)
    }
    fn cuDeviceGetPCIBusId(out: usize, len: i32, ordinal: i32) {
        let device = driver().lock().device(ordinal)?;
        let text = format!("0000:{:02x}:00.0\0", device.ordinal + 1);
        if usize::try_from(len).unwrap_or(0) < text.len() {
            return invalid(format!("room for {len} bytes, {} needed", text.len()));
        }
        host::write(out, text.as_bytes())
    }
    fn cuDeviceGetByPCIBusId(_out: usize, _text: usize) {
        fail(Code::NotSupported, "simulated cards sit on no bus")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_come_from_the_card() {
        let card = Card::of(89).unwrap();
        assert_eq!(attribute(card, 75).unwrap(), 8);
        assert_eq!(attribute(card, 76).unwrap(), 9);
        assert_eq!(attribute(card, 16).unwrap(), 128);
        assert_eq!(attribute(card, 97).unwrap(), 99 << 10);
        assert_eq!(attribute(card, 120).unwrap(), 0);
        assert_eq!(attribute(Card::of(120).unwrap(), 75).unwrap(), 12);
        assert!(attribute(card, 0).is_err());
        assert!(attribute(card, 100_000).is_err());
        assert_ne!(uuid(card, 0), uuid(card, 1));
    }
}
