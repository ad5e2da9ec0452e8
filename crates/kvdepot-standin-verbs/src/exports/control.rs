//! Our own symbols, with which tests control the stand-in.

use std::ffi::{CStr, c_char, c_int};
use std::path::PathBuf;

use kvdepot_verbs::sys::{IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND};

use crate::rng::Rng;
use crate::state::{Fault, lock, wake};

/// # Safety
/// `text` must end with zero.
unsafe fn name(text: *const c_char) -> String {
    // SAFETY: the caller's contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

/// Restarts with the schedule of `seed`. Faults and counters are reset.
#[unsafe(no_mangle)]
extern "C" fn kvdepot_standin_verbs_reset(seed: u64, lazy: c_int) {
    let mut state = lock();
    state.rng = Rng::new(seed);
    state.config.seed = seed;
    state.config.lazy = lazy != 0;
    state.faults.clear();
    state.violations.clear();
    (state.doorbells, state.requests, state.signaled, state.bytes, state.steps) = (0, 0, 0, 0, 0);
    drop(state);
    wake();
}

/// Sets a value of the configuration. Returns -1 if there is none with this name.
#[unsafe(no_mangle)]
unsafe extern "C" fn kvdepot_standin_verbs_set(what: *const c_char, value: u64) -> c_int {
    // SAFETY: the caller gives text that ends with zero.
    let what = unsafe { name(what) };
    let mut state = lock();
    let config = &mut state.config;
    match what.as_str() {
        "devices" => config.devices = value as usize,
        "ethernet" => {
            config.link = if value != 0 { IBV_LINK_LAYER_ETHERNET } else { IBV_LINK_LAYER_INFINIBAND };
        }
        "port_state" => config.port_state = value as u32,
        "ports_down" => config.ports_down = value,
        "region_bytes_max" => config.region_bytes_max = value,
        "peer_bytes_max" => config.peer_bytes_max = value,
        "hung" => config.hung = value != 0,
        "loses_receives" => config.loses_receives = value != 0,
        "peer_offset" => config.peer_offset = value,
        "dmabuf" => config.dmabuf = value != 0,
        _ => return -1,
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn kvdepot_standin_verbs_sysfs(directory: *const c_char) {
    // SAFETY: the caller gives text that ends with zero.
    lock().config.sysfs = PathBuf::from(unsafe { name(directory) });
}

/// Returns a counter.
#[unsafe(no_mangle)]
unsafe extern "C" fn kvdepot_standin_verbs_get(what: *const c_char) -> u64 {
    // SAFETY: the caller gives text that ends with zero.
    let what = unsafe { name(what) };
    let state = lock();
    match what.as_str() {
        "violations" => state.violations.len() as u64,
        "objects" => state.objects(),
        "regions" => state.regions.len() as u64,
        "doorbells" => state.doorbells,
        "requests" => state.requests,
        "signaled" => state.signaled,
        "bytes" => state.bytes,
        "steps" => state.steps,
        "lost_receives" => state.lost_receives,
        _ => u64::MAX,
    }
}

/// Makes `call` fail `times` times with `code`, after `skip` successes.
#[unsafe(no_mangle)]
unsafe extern "C" fn kvdepot_standin_verbs_fail(call: *const c_char, skip: u64, times: u64, code: c_int) {
    // SAFETY: the caller gives text that ends with zero.
    let call = unsafe { name(call) };
    lock().faults.push(Fault { call, skip, times, code });
}

/// Cuts the link of a queue pair, or of all with number 0: requests in flight and later ones are not answered.
#[unsafe(no_mangle)]
extern "C" fn kvdepot_standin_verbs_cut(number: u32) {
    let mut state = lock();
    for (&own, qp) in &mut state.qps {
        if number == 0 || own == number {
            qp.cut = true;
        }
    }
    drop(state);
    wake();
}
