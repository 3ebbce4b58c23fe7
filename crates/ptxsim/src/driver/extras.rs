//! What the simulator has and a driver has not: options, counters, reports.
//!
//! Texts that these functions hand out are given back to `ptxsim_free`. `scope` is 0 for what the calling thread
//! submitted or set, 1 for the whole process.

use super::context::end_all;
use super::error::{Code, Failure, Outcome, fail, invalid};
use super::host;
use super::state::{State, THREAD_OPTIONS, driver};
use crate::card::{CARDS, Card};
use crate::options::Options;
use serde::Serialize;
use serde_json::Value;
use std::collections::VecDeque;
use std::ffi::CString;
use std::thread::{self, ThreadId};

/// What `PTXSIM_CC` and `PTXSIM_OPTIONS` ask for, or what is wrong with them.
pub(crate) fn from_environment() -> Result<(Vec<&'static Card>, Options), String> {
    let mut settings = Vec::new();
    if let Ok(cc) = std::env::var("PTXSIM_CC") {
        settings.push(("PTXSIM_CC", "cc".to_string(), cc));
    }
    if let Ok(options) = std::env::var("PTXSIM_OPTIONS") {
        for item in options.split([',', ' ']).filter(|item| !item.is_empty()) {
            let (name, value) = item.split_once('=').unwrap_or((item, "on"));
            settings.push(("PTXSIM_OPTIONS", name.to_string(), value.to_string()));
        }
    }
    let (mut found, mut options) = (vec![&CARDS[0]], Options::default());
    for (variable, name, value) in settings {
        let failed = |f: Failure| format!("{variable}: {name}={value}: {}", f.reason);
        if name == "cc" {
            found = cards(&value).map_err(failed)?;
        } else {
            options = with(&options, &name, &value).map_err(failed)?;
        }
    }
    Ok((found, options))
}

/// The cards that a list of compute capabilities names: `90`, `9.0`, `sm_90`, `80,90`.
fn cards(list: &str) -> Outcome<Vec<&'static Card>> {
    list.split([',', '+']).map(|text| Card::parse(text).or_else(invalid)).collect()
}

/// Sets an option, or the cards (`cc`; `default` are those that the process started with).
fn set(state: &mut State, name: &str, value: &str) -> Outcome {
    if name == "cc" {
        let cards = match value {
            "default" => from_environment().map(|(cards, _)| cards).or_else(invalid)?,
            list => cards(list)?,
        };
        if !state.contexts.is_empty() {
            return fail(
                Code::PrimaryContextActive,
                "cards can be chosen before there is a context, or after ptxsim_reset",
            );
        }
        state.set_cards(&cards);
        return Ok(());
    }
    state.options = with(&state.options, name, value)?;
    Ok(())
}

fn plain(name: &str) -> String {
    name.chars().filter(char::is_ascii_alphanumeric).collect::<String>().to_ascii_lowercase()
}

/// Options with one changed. Names are those of [`Options`]' fields; `seed`, `delay`, `uninitialized` and `checks` are
/// short for `shuffle_seed`, `delay_streams`, both kinds of uninitialised memory, and all checks.
fn with(options: &Options, name: &str, value: &str) -> Outcome<Options> {
    let fields: &[&str] = match name {
        "seed" => &["shuffle_seed"],
        "delay" => &["delay_streams"],
        "uninitialized" => &["uninitialized_global", "uninitialized_shared"],
        "checks" => {
            return match plain(value).as_str() {
                "on" | "true" => Ok(Options::default()),
                "off" | "false" => Ok(Options::unchecked()),
                _ => invalid(format!("{value:?} is neither on nor off")),
            };
        }
        name => &[name],
    };
    let mut changed = *options;
    for field in fields {
        let mut all = serde_json::to_value(changed).unwrap_or_default();
        let Some(place) = all.get_mut(*field) else {
            let names: Vec<&String> = all.as_object().map(|o| o.keys().collect()).unwrap_or_default();
            return invalid(format!("no option {field:?}; there are {names:?}"));
        };
        *place = match (plain(value).as_str(), &*place) {
            ("on" | "true" | "1", Value::Bool(_)) => true.into(),
            ("off" | "false" | "0", Value::Bool(_)) => false.into(),
            ("none" | "off", _) if *field == "shuffle_seed" => Value::Null,
            ("off", Value::String(_)) => "Off".into(),
            ("onuse" | "use", Value::String(_)) => "OnUse".into(),
            ("strict" | "on", Value::String(_)) => "Strict".into(),
            (_, Value::Number(_) | Value::Null) => {
                value.replace('_', "").parse::<u64>().map(Value::from).unwrap_or_else(|_| value.into())
            }
            _ => value.into(),
        };
        changed = match serde_json::from_value(all) {
            Ok(options) => options,
            Err(error) => return invalid(format!("{value:?} for {field}: {error}")),
        };
    }
    Ok(changed)
}

/// Hands out a text.
fn give(state: &mut State, out: usize, text: String) -> Outcome {
    let text = CString::new(text.replace('\0', "")).unwrap_or_default();
    let address = text.as_ptr() as usize;
    host::put(out, address)?;
    state.texts.insert(address, text);
    Ok(())
}

fn json<T: Serialize>(value: &T) -> Outcome<String> {
    match serde_json::to_string(value) {
        Ok(text) => Ok(text),
        Err(error) => fail(Code::Unknown, error.to_string()),
    }
}

/// Takes what is in scope out of a queue.
fn take<T>(queue: &mut VecDeque<(ThreadId, T)>, scope: i32) -> Vec<T> {
    let here = thread::current().id();
    let all = std::mem::take(queue);
    let (taken, left): (VecDeque<_>, VecDeque<_>) =
        all.into_iter().partition(|(t, _)| scope == 1 || *t == here);
    *queue = left;
    taken.into_iter().map(|(_, item)| item).collect()
}

fn check_scope(scope: i32) -> Outcome {
    if scope == 0 || scope == 1 { Ok(()) } else { invalid(format!("scope {scope}, must be 0 or 1")) }
}

api! {
    fn ptxsim_set_option(name: usize, value: usize) {
        let (name, value) = (host::name(name)?, host::name(value)?);
        set(&mut driver().lock(), &name, &value)
    }
    fn ptxsim_set_options(json: usize, scope: i32) {
        check_scope(scope)?;
        let options = match json {
            0 => None,
            text => match serde_json::from_str::<Options>(&host::name(text)?) {
                Ok(options) => Some(options),
                Err(error) => return invalid(format!("options: {error}")),
            },
        };
        if scope == 0 {
            THREAD_OPTIONS.set(options);
        } else {
            let mut guard = driver().lock();
            guard.options = options.unwrap_or(guard.first_options);
        }
        Ok(())
    }
    fn ptxsim_options(out: usize) {
        host::need(out)?;
        let mut guard = driver().lock();
        let text = json(&guard.options())?;
        give(&mut guard, out, text)
    }
    fn ptxsim_take_stats(out: usize, scope: i32) {
        host::need(out)?;
        check_scope(scope)?;
        let mut guard = driver().lock();
        let text = json(&take(&mut guard.stats, scope))?;
        give(&mut guard, out, text)
    }
    fn ptxsim_take_reports(out: usize, scope: i32) {
        host::need(out)?;
        check_scope(scope)?;
        let mut guard = driver().lock();
        let text = json(&take(&mut guard.faults, scope))?;
        give(&mut guard, out, text)
    }
    fn ptxsim_take_calls(out: usize) {
        host::need(out)?;
        let text = json(&super::CALLS.take())?;
        give(&mut driver().lock(), out, text)
    }
    fn ptxsim_used(out: usize) {
        host::need(out)?;
        let guard = driver().lock();
        let context = guard.usable()?;
        host::put(out, guard.device_of(context)?.memory.used())
    }
    fn ptxsim_free(text: usize) {
        match driver().lock().texts.remove(&text) {
            Some(_) => Ok(()),
            None => invalid(format!("{text:#x} is no text of these functions")),
        }
    }
    fn ptxsim_reset() {
        let mut guard = end_all(driver().lock());
        guard.stats.clear();
        guard.faults.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Uninitialized;

    #[test]
    fn options_by_name() {
        let start = Options::default();
        assert!(!with(&start, "races", "off").unwrap().races);
        assert!(with(&start, "delay", "on").unwrap().delay_streams);
        assert_eq!(with(&start, "seed", "7").unwrap().shuffle_seed, Some(7));
        assert_eq!(with(&with(&start, "seed", "7").unwrap(), "seed", "none").unwrap().shuffle_seed, None);
        assert_eq!(with(&start, "instruction_limit", "1_000").unwrap().instruction_limit, 1000);
        for name in ["on-use", "OnUse", "use"] {
            let on_use = with(&start, "uninitialized", name).unwrap();
            assert_eq!(on_use.uninitialized_global, Uninitialized::OnUse);
            assert_eq!(on_use.uninitialized_shared, Uninitialized::OnUse);
        }
        assert_eq!(with(&start, "checks", "off").unwrap(), Options::unchecked());
        for (name, value) in
            [("rces", "off"), ("races", "maybe"), ("threads", "-1"), ("seed", "x"), ("checks", "2")]
        {
            assert!(with(&start, name, value).is_err(), "{name}={value}");
        }
    }

    #[test]
    fn cards_by_capability() {
        let ccs = |text: &str| cards(text).map(|all| all.iter().map(|c| c.cc).collect::<Vec<_>>());
        assert_eq!(ccs("90").unwrap(), [90]);
        assert_eq!(ccs("8.0,sm_120").unwrap(), [80, 120]);
        assert!(ccs("70").is_err());
        assert!(ccs("").is_err());
    }
}
