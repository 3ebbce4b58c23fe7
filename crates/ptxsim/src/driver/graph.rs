//! Graphs and their launches.

use super::error::{Code, Outcome, fail, invalid};
use super::host;
use super::state::{Kind, State, driver};
use super::work::{Action, OpId};
use std::sync::Arc;

/// A captured operation.
#[derive(Debug)]
pub(crate) struct Node {
    /// Places in the graph of those it comes after; all are smaller than its own.
    pub(crate) after: Vec<usize>,
    pub(crate) action: Action,
}

/// A graph.
#[derive(Debug)]
pub(crate) struct Graph {
    pub(crate) context: u64,
    pub(crate) nodes: Arc<[Node]>,
}

/// A graph that can be launched.
#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) context: u64,
    nodes: Arc<[Node]>,
    /// The end of its last launch.
    last: Option<OpId>,
}

/// The nodes that no other comes after.
pub(crate) fn leaves(nodes: &[Node]) -> Vec<usize> {
    let mut leaf = vec![true; nodes.len()];
    nodes.iter().flat_map(|n| &n.after).for_each(|before| leaf[*before] = false);
    (0..nodes.len()).filter(|i| leaf[*i]).collect()
}

impl State {
    fn graph(&self, handle: u64) -> Outcome<&Graph> {
        self.started()?;
        match self.graphs.get(&handle) {
            Some(graph) => Ok(graph),
            None => invalid(format!("{handle:#x} is no graph, or one that was destroyed")),
        }
    }

    fn exec(&self, handle: u64) -> Outcome<&Exec> {
        self.usable()?;
        match self.execs.get(&handle) {
            Some(exec) => Ok(exec),
            None => invalid(format!("{handle:#x} is no executable graph, or one that was destroyed")),
        }
    }
}

fn instantiate(out: usize, graph: u64, flags: u64) -> Outcome {
    host::need(out)?;
    if flags & !15 != 0 {
        return invalid(format!("flags {flags:#x}"));
    }
    if flags & 4 != 0 {
        return fail(Code::NotSupported, "launches from the device");
    }
    let mut guard = driver().lock();
    guard.usable()?;
    let Graph { context, nodes } = guard.graph(graph)?;
    let exec = Exec { context: *context, nodes: Arc::clone(nodes), last: None };
    let handle = guard.handle(Kind::Exec);
    host::put(out, handle)?;
    guard.execs.insert(handle, exec);
    Ok(())
}

fn launch(handle: u64, stream: u64) -> Outcome {
    let mut guard = driver().lock();
    let (stream, context) = guard.stream(stream)?;
    let exec = guard.exec(handle)?;
    if exec.context != context {
        return fail(Code::InvalidHandle, "graph and stream belong to different contexts");
    }
    let (nodes, last) = (Arc::clone(&exec.nodes), exec.last);
    if guard.captured(stream)? {
        return guard.add_nodes(stream, &nodes);
    }
    let start = guard.enqueue_after(stream, Action::Nothing, last.into_iter().collect())?;
    let mut ops: Vec<OpId> = Vec::with_capacity(nodes.len());
    for node in nodes.iter() {
        let mut after: Vec<OpId> = node.after.iter().map(|n| ops[*n]).collect();
        after.push(start);
        ops.push(guard.submit(context, after, node.action.clone()));
    }
    let ends = leaves(&nodes).into_iter().map(|n| ops[n]).collect();
    let end = guard.enqueue_after(stream, Action::Nothing, ends)?;
    if let Some(exec) = guard.execs.get_mut(&handle) {
        exec.last = Some(end);
    }
    drop(driver().settle(guard, end));
    Ok(())
}

api! {
    fn cuGraphCreate(out: usize, flags: u32) {
        host::need(out)?;
        if flags != 0 {
            return invalid(format!("flags {flags:#x}"));
        }
        let mut guard = driver().lock();
        let context = guard.usable()?;
        let handle = guard.handle(Kind::Graph);
        host::put(out, handle)?;
        guard.graphs.insert(handle, Graph { context, nodes: Arc::new([]) });
        Ok(())
    }
    fn cuGraphGetNodes(graph: u64, nodes: usize, count: usize) {
        host::need(count)?;
        let guard = driver().lock();
        let all = guard.graph(graph)?.nodes.len();
        if nodes != 0 {
            return fail(Code::NotSupported, "handles of nodes; their number can be asked for");
        }
        host::put(count, all)
    }
    fn cuGraphDestroy(handle: u64) {
        let mut guard = driver().lock();
        guard.graph(handle)?;
        guard.graphs.remove(&handle);
        Ok(())
    }
    fn cuGraphInstantiateWithFlags(out: usize, graph: u64, flags: u64) {
        instantiate(out, graph, flags)
    }
    fn cuGraphUpload(exec: u64, stream: u64) {
        let mut guard = driver().lock();
        guard.exec(exec)?;
        let (stream, _) = guard.stream(stream)?;
        guard.refuse_captured(stream, "an upload of a graph")
    }
    fn cuGraphLaunch(exec: u64, stream: u64) {
        launch(exec, stream)
    }
    fn cuGraphExecDestroy(handle: u64) {
        let mut guard = driver().lock();
        guard.started()?;
        match guard.execs.remove(&handle) {
            Some(_) => Ok(()),
            None => invalid(format!("{handle:#x} is no executable graph, or one that was destroyed")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leaves_are_what_nothing_follows() {
        let node = |after: &[usize]| Node { after: after.to_vec(), action: Action::Nothing };
        let diamond = [node(&[]), node(&[0]), node(&[0]), node(&[1, 2]), node(&[0])];
        assert_eq!(leaves(&diamond), [3, 4]);
        assert_eq!(leaves(&[]), [0; 0]);
    }
}
