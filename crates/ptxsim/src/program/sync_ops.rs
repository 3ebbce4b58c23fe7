//! Barriers, fences and asynchronous copies.

use super::code::*;
use super::decode::Decoder;
use super::operands::flatten;
use crate::exec::regs::File;
use crate::ptx::ast::{Instruction, Operand, Type};
use crate::stats::Class;

impl Decoder<'_> {
    /// An instruction that waits, orders or copies in the background; `None` if it is none.
    pub(super) fn synchronisation(&mut self, i: &Instruction) -> Result<Option<(What, Class)>, String> {
        Ok(Some(match &*i.opcode {
            "bar" | "barrier" if i.has("warp") => {
                let members = self.narrow(i.operands.first())?;
                (What::WarpSync { members }, Class::Barrier)
            }
            "barrier" if i.has("cluster") => {
                let (arrive, wait) = (i.has("arrive"), i.has("wait"));
                if arrive == wait {
                    return Err("expected .arrive or .wait".into());
                }
                (What::ClusterBarrier { arrive, aligned: i.has("aligned") }, Class::Barrier)
            }
            "bar" | "barrier" => (self.barrier(i)?, Class::Barrier),
            // Between proxies, and for what mbarrier.init wrote: nothing is out of order here.
            "membar" | "fence"
                if i.modifiers.iter().any(|m| m.starts_with("proxy") || &**m == "mbarrier_init") =>
            {
                (What::Nothing, Class::Barrier)
            }
            "membar" | "fence" => (What::Fence, Class::Barrier),
            "nanosleep" | "pmevent" => (What::Nothing, Class::Other),
            "griddepcontrol" | "setmaxnreg" => (What::Checked, Class::Other),
            "mbarrier" => (self.mbarrier(i)?, Class::Barrier),
            "cp" if i.has("bulk") => (self.bulk(i)?, Class::AsyncCopy),
            "cp" if i.has("async") => (self.async_copy(i)?, Class::AsyncCopy),
            "tensormap" => return Err("tensormap.replace and .cp_fenceproxy are not supported".into()),
            "wgmma" => return Err("wgmma is not supported yet: build the kernel for sm_80 or sm_89".into()),
            _ => return Ok(None),
        }))
    }

    fn barrier(&mut self, i: &Instruction) -> Result<What, String> {
        Self::only(i, |m| {
            matches!(m, "sync" | "red" | "arrive" | "aligned" | "cta" | "popc" | "and" | "or")
        })?;
        let aligned = &*i.opcode == "bar" || i.has("aligned");
        let (red, arrive) = (i.has("red"), i.has("arrive"));
        let mut operands: Vec<&Operand> = i.operands.iter().collect();
        let mut reduce = None;
        if red {
            let kind = match () {
                () if i.has("popc") => Reduce::Count,
                () if i.has("and") => Reduce::All,
                () if i.has("or") => Reduce::Any,
                () => return Err("expected .popc, .and or .or".into()),
            };
            if operands.len() < 3 {
                return Err("operands are missing".into());
            }
            let to = match operands.remove(0) {
                Operand::Register(r) => self.register(*r)?,
                other => return Err(format!("expected a register, got {other:?}")),
            };
            if (kind == Reduce::Count) != (to.file == File::Narrow) {
                return Err("the destination has the wrong type".into());
            }
            let (p, negated) = self.predicate(operands.pop())?;
            reduce = Some((kind, to, p, negated));
            self.flow.to = [to].into();
        }
        if operands.is_empty() || operands.len() > 2 || arrive && operands.len() != 2 {
            return Err(format!(
                "expected a barrier and a number of threads, got {} operands",
                operands.len()
            ));
        }
        let id = self.narrow(operands.first().copied())?;
        let threads = match operands.get(1) {
            Some(o) => Some(self.narrow(Some(o))?),
            None => None,
        };
        Ok(What::Barrier(Box::new(Barrier { id, threads, arrive, aligned, reduce })))
    }

    /// A predicate operand and whether it is negated.
    fn predicate(&mut self, operand: Option<&Operand>) -> Result<(u16, bool), String> {
        match operand {
            Some(Operand::Register(r) | Operand::Not(r)) => {
                let row = self.register(*r)?;
                if row.file != File::Pred {
                    return Err("expected a predicate".into());
                }
                Ok((row.row, matches!(operand, Some(Operand::Not(_)))))
            }
            Some(Operand::Integer(n)) => Ok((self.rows.constant(File::Pred, u64::from(*n != 0))?, false)),
            other => Err(format!("expected a predicate, got {other:?}")),
        }
    }

    fn mbarrier(&mut self, i: &Instruction) -> Result<What, String> {
        let op = |n: usize| i.operands.get(n);
        let found = if i.has("init") {
            Mbarrier::Init { address: self.address(op(0))?, count: self.narrow(op(1))? }
        } else if i.has("inval") {
            Mbarrier::Invalidate { address: self.address(op(0))? }
        } else if i.has("arrive") || i.has("arrive_drop") {
            let has_state = !matches!(op(0), Some(Operand::Address(_)));
            let state = match op(0) {
                Some(Operand::Register(r)) => {
                    let row = self.register(*r)?;
                    if row.file != File::Wide {
                        return Err("the state must be a 64-bit register".into());
                    }
                    Some(row.row)
                }
                _ => None,
            };
            let at = usize::from(has_state);
            let address = self.address(op(at))?;
            let value = match op(at + 1) {
                Some(o) => Some(self.narrow(Some(o))?),
                None => None,
            };
            let expects = i.has("expect_tx");
            Mbarrier::Arrive {
                address,
                state,
                count: if expects { None } else { value },
                expect: if expects { Some(value.ok_or("the number of bytes is missing")?) } else { None },
                drop: i.has("arrive_drop"),
            }
        } else if i.has("expect_tx") {
            Mbarrier::Expect { address: self.address(op(0))?, bytes: self.narrow(op(1))? }
        } else if i.has("complete_tx") {
            Mbarrier::Complete { address: self.address(op(0))?, bytes: self.narrow(op(1))? }
        } else if i.has("test_wait") || i.has("try_wait") {
            let parity = i.has("parity");
            let (done, _) = self.predicate(op(0))?;
            let address = self.address(op(1))?;
            let phase = match op(2) {
                Some(o) if parity => RowRef { file: File::Narrow, row: self.narrow(Some(o))? },
                Some(Operand::Register(r)) => self.register(*r)?,
                other => return Err(format!("expected a state or parity, got {other:?}")),
            };
            if !parity && phase.file != File::Wide {
                return Err("the state must be a 64-bit register".into());
            }
            Mbarrier::Wait { address, done, phase, parity, blocks: i.has("try_wait") }
        } else if i.has("pending_count") {
            let (Some(Operand::Register(c)), Some(Operand::Register(s))) = (op(0), op(1)) else {
                return Err("expected two registers".into());
            };
            let (count, state) = (self.register(*c)?, self.register(*s)?);
            if count.file != File::Narrow || state.file != File::Wide {
                return Err("an operand has the wrong size".into());
            }
            Mbarrier::Pending { count: count.row, state: state.row }
        } else {
            return Err("the operation is not known".into());
        };
        Ok(What::Mbarrier(Box::new(found)))
    }

    fn integer(operand: Option<&Operand>) -> Result<u32, String> {
        match operand {
            Some(Operand::Integer(n)) if (0..=i128::from(u32::MAX)).contains(n) => Ok(*n as u32),
            other => Err(format!("expected an integer, got {other:?}")),
        }
    }

    fn async_copy(&mut self, i: &Instruction) -> Result<What, String> {
        if i.has("commit_group") {
            return Ok(What::CopyCommit);
        }
        if i.has("wait_all") {
            return Ok(What::CopyWait { leave: 0, all: true });
        }
        if i.has("wait_group") {
            return Ok(What::CopyWait { leave: Self::integer(i.operands.first())?, all: false });
        }
        if i.has("mbarrier") {
            let address = self.address(i.operands.first())?;
            return Ok(What::CopyArrive { address, no_increment: i.has("noinc") });
        }
        Self::only(i, |m| matches!(m, "async" | "shared" | "shared::cta" | "global"))?;
        let to = self.address(i.operands.first())?;
        let from = self.address(i.operands.get(1))?;
        let bytes = Self::integer(i.operands.get(2))?;
        if !matches!(bytes, 4 | 8 | 16) || i.has("cg") && bytes != 16 {
            return Err(format!("copies of {bytes} bytes do not exist in this form"));
        }
        let mut source_bytes = None;
        let mut ignore = None;
        match i.operands.get(3) {
            None => {}
            Some(Operand::Register(r)) => {
                let row = self.register(*r)?;
                match row.file {
                    File::Pred => ignore = Some((row.row, false)),
                    File::Narrow => source_bytes = Some(row.row),
                    // A cache policy.
                    File::Wide => {}
                }
            }
            Some(Operand::Not(_)) => ignore = Some(self.predicate(i.operands.get(3))?),
            Some(o) => source_bytes = Some(self.narrow(Some(o))?),
        }
        Ok(What::Copy(Box::new(AsyncCopy { to, from, bytes, source_bytes, ignore })))
    }

    fn bulk(&mut self, i: &Instruction) -> Result<What, String> {
        if i.has("commit_group") {
            return Ok(What::BulkCommit);
        }
        if i.has("wait_group") {
            return Ok(What::BulkWait { leave: Self::integer(i.operands.first())? });
        }
        if i.has("prefetch") {
            return Ok(What::Nothing);
        }
        let spaces: Vec<&str> = i
            .modifiers
            .iter()
            .map(|m| &**m)
            .filter(|m| matches!(*m, "global" | "shared::cta" | "shared::cluster" | "shared"))
            .collect();
        let [to, from] = spaces[..] else { return Err("expected two state spaces".into()) };
        if i.modifiers
            .iter()
            .any(|m| m.starts_with("im2col") || m.starts_with("tile::") || m.starts_with("cta_group"))
        {
            return Err("only tile mode is supported".into());
        }
        let (load, to_space) = match (to, from) {
            ("global", _) => (false, Where::Global),
            (_, "global") => (true, if to == "shared::cluster" { Where::Cluster } else { Where::Shared }),
            _ => (false, Where::Cluster),
        };
        let reduce = if i.modifiers.first().is_some_and(|m| &**m == "reduce") || i.has("reduce") {
            let kind = i.modifiers.iter().find_map(|m| match &**m {
                "add" => Some(AtomicKind::Add),
                "min" => Some(AtomicKind::Min),
                "max" => Some(AtomicKind::Max),
                "and" => Some(AtomicKind::And),
                "or" => Some(AtomicKind::Or),
                "xor" => Some(AtomicKind::Xor),
                _ => None,
            });
            let ty = i.ty().ok_or("the type is missing")?;
            if to != "global" || i.has("tensor") {
                return Err("cp.reduce.async.bulk is supported to global memory only, without tensors".into());
            }
            Some((kind.ok_or("the reduction is not supported")?, ty))
        } else {
            None
        };
        let zero = self.rows.constant(File::Wide, 0)?;
        let nowhere = AddressRow { row: RowRef { file: File::Wide, row: zero }, offset: 0 };
        let mut bulk = Bulk {
            load,
            to: nowhere,
            to_space,
            from: nowhere,
            bytes: 0,
            mbarrier: None,
            multicast: None,
            tensor: None,
            reduce,
        };
        let tensor = |d: &mut Self, o: Option<&Operand>| -> Result<(AddressRow, Box<[u16]>), String> {
            let Some(Operand::Tensor(a, lists)) = o else {
                return Err(format!("expected a tensor map and coordinates, got {o:?}"));
            };
            let map = d.address_of(a)?;
            let mut flat = Vec::new();
            lists.first().into_iter().flatten().for_each(|o| flatten(o, &mut flat));
            let rows = flat.into_iter().map(|o| d.narrow(Some(o))).collect::<Result<_, _>>()?;
            Ok((map, rows))
        };
        let mut next;
        if i.has("tensor") {
            if load {
                bulk.to = self.address(i.operands.first())?;
                bulk.tensor = Some(tensor(self, i.operands.get(1))?);
            } else {
                bulk.tensor = Some(tensor(self, i.operands.first())?);
                bulk.from = self.address(i.operands.get(1))?;
            }
            next = 2;
        } else {
            bulk.to = self.address(i.operands.first())?;
            bulk.from = self.address(i.operands.get(1))?;
            bulk.bytes = self.narrow(i.operands.get(2))?;
            next = 3;
        }
        if i.modifiers.iter().any(|m| m.starts_with("mbarrier")) {
            bulk.mbarrier = Some(self.address(i.operands.get(next))?);
            next += 1;
        }
        if i.has("multicast::cluster") {
            bulk.multicast = Some(self.narrow(i.operands.get(next))?);
        }
        if bulk.tensor.as_ref().is_some_and(|(_, c)| c.is_empty() || c.len() > 5)
            || i.ty() == Some(Type::Pred)
        {
            return Err("expected 1 to 5 coordinates".into());
        }
        Ok(What::Bulk(Box::new(bulk)))
    }
}
