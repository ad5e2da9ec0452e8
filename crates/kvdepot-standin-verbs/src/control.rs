//! Control of the stand-in by tests.

use std::ffi::{CString, c_char, c_int};
use std::fmt;
use std::path::{Path, PathBuf};

use libloading::os::unix::Library;
use tempfile::TempDir;

const FILE: &str = "libkvdepot_standin_verbs.so";

/// Returns the path of the library that cargo built with the running test, next to it.
///
/// # Panics
///
/// If it does not exist; the package must be a dev-dependency of the test.
pub fn library_path() -> PathBuf {
    let own = std::env::current_exe().expect("a program knows its own path");
    let places =
        own.ancestors().skip(1).take(2).flat_map(|place| [place.join(FILE), place.join("deps").join(FILE)]);
    let places: Vec<PathBuf> = places.collect();
    places
        .iter()
        .find(|path| path.exists())
        .cloned()
        .unwrap_or_else(|| panic!("{FILE} is in none of {places:?}"))
}

/// A private copy of the stand-in, so that tests which run in parallel do not share one. It is in lazy mode: work is
/// done when something polls or waits.
pub struct StandIn {
    path: PathBuf,
    reset: unsafe extern "C" fn(u64, c_int),
    set: unsafe extern "C" fn(*const c_char, u64) -> c_int,
    sysfs: unsafe extern "C" fn(*const c_char),
    get: unsafe extern "C" fn(*const c_char) -> u64,
    fail: unsafe extern "C" fn(*const c_char, u64, u64, c_int),
    cut: unsafe extern "C" fn(u32),
    _directory: TempDir,
}

impl StandIn {
    /// Makes a new copy with the schedule of `seed`.
    ///
    /// # Panics
    ///
    /// If it cannot be copied or loaded.
    pub fn new(seed: u64) -> Self {
        let directory = TempDir::new().expect("a directory can be made");
        let path = directory.path().join(FILE);
        std::fs::copy(library_path(), &path).expect("the library can be copied");
        // SAFETY: our own library, which has no constructor.
        let library = unsafe { Library::new(&path) }.expect("the library can be loaded");
        // SAFETY: the types are those of `exports::control`.
        let standin = unsafe {
            Self {
                reset: *library.get(b"kvdepot_standin_verbs_reset\0").expect("exported"),
                set: *library.get(b"kvdepot_standin_verbs_set\0").expect("exported"),
                sysfs: *library.get(b"kvdepot_standin_verbs_sysfs\0").expect("exported"),
                get: *library.get(b"kvdepot_standin_verbs_get\0").expect("exported"),
                fail: *library.get(b"kvdepot_standin_verbs_fail\0").expect("exported"),
                cut: *library.get(b"kvdepot_standin_verbs_cut\0").expect("exported"),
                path,
                _directory: directory,
            }
        };
        // Its thread lives as long as the process.
        std::mem::forget(library);
        standin.reset(seed);
        standin
    }

    /// Returns the path for `Verbs::load_from`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Restarts with the schedule of `seed` in lazy mode. Faults and counters are reset, objects stay.
    pub fn reset(&self, seed: u64) {
        // SAFETY: numbers only.
        unsafe { (self.reset)(seed, 1) };
    }

    /// Restarts with the schedule of `seed` and a thread that does the work.
    pub fn reset_eager(&self, seed: u64) {
        // SAFETY: numbers only.
        unsafe { (self.reset)(seed, 0) };
    }

    /// Sets `devices`, `ethernet`, `port_state`, `ports_down`, `region_bytes_max`, `peer_bytes_max`, `peer_offset`, `hung`,
    /// `loses_receives` or `dmabuf`.
    ///
    /// # Panics
    /// When there is no such thing.
    pub fn set(&self, what: &str, value: u64) {
        let what = text(what);
        // SAFETY: the text lives until the call has returned.
        let rc = unsafe { (self.set)(what.as_ptr(), value) };
        assert_eq!(rc, 0, "there is nothing called {what:?}");
    }

    /// Sets the directory with the devices' entries of sysfs.
    pub fn set_sysfs(&self, directory: &Path) {
        let directory = text(&directory.to_string_lossy());
        // SAFETY: as above.
        unsafe { (self.sysfs)(directory.as_ptr()) };
    }

    /// Reads `violations`, `objects`, `regions`, `doorbells`, `requests`, `signaled`, `bytes`, `steps` or
    /// `lost_receives`.
    ///
    /// # Panics
    /// When there is no such counter.
    pub fn get(&self, what: &str) -> u64 {
        let what = text(what);
        // SAFETY: as above.
        let value = unsafe { (self.get)(what.as_ptr()) };
        assert_ne!(value, u64::MAX, "there is nothing called {what:?}");
        value
    }

    /// Makes `call` fail `times` times with `code` (an errno; for the call `completion` a status), after it succeeded
    /// `skip` times. Calls have their C names; those of a context's table are `post_send`, `poll_cq` and so on.
    pub fn fail(&self, call: &str, skip: u64, times: u64, code: i32) {
        let call = text(call);
        // SAFETY: as above.
        unsafe { (self.fail)(call.as_ptr(), skip, times, code) };
    }

    /// Cuts the link of queue pair `number`, or of all with 0.
    pub fn cut(&self, number: u32) {
        // SAFETY: a number only.
        unsafe { (self.cut)(number) };
    }
}

fn text(text: &str) -> CString {
    CString::new(text).expect("no zero inside")
}

impl fmt::Debug for StandIn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StandIn({})", self.path.display())
    }
}
