//! A connected rank: the plugin's tables, called as NCCL calls them.

use crate::harness::{CONTEXTS, LIMIT, Rank};
use crate::memory::Memory;
use nccl_gin_soft::abi::gin_v13::GinConfig;
use nccl_gin_soft::abi::rma_v14::RmaConfig;
use nccl_gin_soft::abi::{LOG_WARN, Logger, ResultCode, SIGNAL_ADD};
use nccl_gin_soft::{GIN_V12, GIN_V13, RMA_V14};
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

static WARNINGS: AtomicU64 = AtomicU64::new(0);

/// Warnings of the plugin in this process so far.
pub fn warnings() -> u64 {
    WARNINGS.load(Ordering::Relaxed)
}

unsafe extern "C" fn logger(
    level: c_int,
    _: c_ulong,
    _: *const c_char,
    line: c_int,
    _: *const c_char,
    text: *const c_char,
) {
    if level == LOG_WARN {
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    }
    if std::env::var_os("GIN_TEST_VERBOSE").is_some() {
        // SAFETY: the plugin passes one C string with the format "%s".
        let text = unsafe { CStr::from_ptr(text) };
        eprintln!("[{}] {level}:{line} {}", std::process::id(), text.to_string_lossy());
    }
}

fn variadic_logger() -> Logger {
    type Fixed = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    let fixed: Fixed = logger;
    // SAFETY: on Linux, x86-64 and AArch64 alike, integers and pointers of a variadic call are passed where those of any other are, and the plugin
    // always passes exactly one string behind the format.
    unsafe { std::mem::transmute::<Fixed, Logger>(fixed) }
}

#[track_caller]
pub fn ok(code: ResultCode) {
    assert_eq!(code, ResultCode::SUCCESS);
}

pub type Request = *mut c_void;

/// A connected rank.
pub struct Wire {
    pub here: Rank,
    version: u32,
    plugin: *mut c_void,
    comm: *mut c_void,
    contexts: *mut c_void,
}

/// What a put names.
#[derive(Clone, Copy)]
pub struct At(pub *mut c_void, pub u64);

pub const NOWHERE: At = At(null_mut(), 0);

impl Wire {
    pub fn connect(here: Rank, version: u32) -> Self {
        let mut wire = Self { here, version, plugin: null_mut(), comm: null_mut(), contexts: null_mut() };
        ok(wire.try_connect(|_| {}));
        wire
    }

    pub fn unconnected(here: Rank, version: u32) -> Self {
        Self { here, version, plugin: null_mut(), comm: null_mut(), contexts: null_mut() }
    }

    /// Connects, after `change` has had its way with the handles.
    pub fn try_connect(&mut self, change: impl FnOnce(&mut [[u8; 128]])) -> ResultCode {
        let (rank, ranks) = (self.here.rank, self.here.ranks);
        let mut handle = [0u8; 128];
        let mut door = null_mut();
        let (count, index) = (ranks as c_int, rank as c_int);
        // SAFETY: the functions get what NCCL gives them: places for one write each, live objects, and as many handles as ranks.
        unsafe {
            ok((RMA_V14.init)(&mut self.plugin, 1, variadic_logger()));
            ok((RMA_V14.listen)(self.plugin, 0, handle.as_mut_ptr().cast(), &mut door));
            let mut all = self.here.board.all_gather(rank, ranks, &handle);
            change(&mut all);
            let mut list: Vec<*mut c_void> = all.iter_mut().map(|one| one.as_mut_ptr().cast()).collect();
            let list = list.as_mut_ptr();
            // Some versions pass a foreign context here.
            let foreign = 16 as *mut c_void;
            let code = match self.version {
                12 => (GIN_V12.connect)(foreign, list, count, index, CONTEXTS, 0, door, &mut self.comm),
                13 => (GIN_V13.connect)(foreign, list, count, index, door, &mut self.comm),
                _ => (RMA_V14.connect)(foreign, list, count, index, door, &mut self.comm),
            };
            ok((RMA_V14.close_listen)(door));
            if code != ResultCode::SUCCESS {
                return code;
            }
            match self.version {
                12 => {}
                13 => {
                    let mut config = GinConfig {
                        n_signals: 0,
                        n_counters: 0,
                        n_contexts: CONTEXTS,
                        queue_depth: 0,
                        traffic_class: -1,
                    };
                    ok((GIN_V13.create_context)(self.comm, &mut config, &mut self.contexts, null_mut()));
                }
                _ => {
                    let mut config = RmaConfig { n_contexts: CONTEXTS, traffic_class: -1, rank_stride: 1 };
                    ok((RMA_V14.create_context)(self.comm, &mut config, &mut self.contexts));
                }
            }
        }
        ResultCode::SUCCESS
    }

    pub fn register(&self, memory: Memory, kind: c_int, flags: u64) -> *mut c_void {
        let (code, handle) = self.try_register(memory, kind, flags);
        ok(code);
        assert!(!handle.is_null());
        handle
    }

    pub fn try_register(&self, memory: Memory, kind: c_int, flags: u64) -> (ResultCode, *mut c_void) {
        let (mut handle, mut other) = (null_mut(), null_mut());
        let (data, size) = (memory.base as *mut c_void, memory.size);
        // SAFETY: a live connection, live memory, and places for the handles.
        let code = unsafe {
            match self.version {
                12 => (GIN_V12.reg_mr_sym)(self.comm, data, size, kind, flags, &mut handle, &mut other),
                13 => (GIN_V13.reg_mr_sym_dma_buf)(
                    self.comm,
                    data,
                    size,
                    kind,
                    0,
                    -1,
                    flags,
                    &mut handle,
                    &mut other,
                ),
                _ => (RMA_V14.reg_mr_sym)(self.comm, data, size, kind, flags, &mut handle),
            }
        };
        if code == ResultCode::SUCCESS && self.version < 14 {
            assert_eq!(handle, other);
        }
        (code, handle)
    }

    pub fn deregister(&self, handle: *mut c_void) {
        // SAFETY: a live connection; the handle is of `register`.
        ok(unsafe { (RMA_V14.dereg_mr_sym)(self.comm, handle) });
    }

    pub fn put(&self, context: i32, from: At, size: usize, to: At, rank: usize) -> Request {
        let (code, request) = self.try_put(context, from, size, to, rank);
        ok(code);
        assert!(!request.is_null());
        request
    }

    pub fn try_put(&self, context: i32, from: At, size: usize, to: At, rank: usize) -> (ResultCode, Request) {
        let mut request = null_mut();
        let rank = rank as u32;
        // SAFETY: live objects, and a place for the request; handles and offsets are checked by the plugin.
        let code = unsafe {
            match self.version {
                12 => {
                    (GIN_V12.iput)(self.comm, from.1, from.0, size, to.1, to.0, rank, context, &mut request)
                }
                13 => (GIN_V13.iput)(
                    self.contexts,
                    context,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    &mut request,
                ),
                _ => (RMA_V14.iput)(
                    self.contexts,
                    context,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    &mut request,
                ),
            }
        };
        (code, request)
    }

    /// Puts, and adds `value` to a word of the rank.
    #[expect(clippy::too_many_arguments, reason = "those of the C function")]
    pub fn put_signal(
        &self,
        context: i32,
        from: At,
        size: usize,
        to: At,
        rank: usize,
        word: At,
        value: u64,
    ) -> Request {
        self.put_signal_as(context, from, size, to, rank, word, value, SIGNAL_ADD)
    }

    #[expect(clippy::too_many_arguments, reason = "those of the C function")]
    pub fn put_signal_as(
        &self,
        context: i32,
        from: At,
        size: usize,
        to: At,
        rank: usize,
        word: At,
        value: u64,
        operation: u32,
    ) -> Request {
        let mut request = null_mut();
        let (strong, rank) = (value.is_multiple_of(2), rank as u32);
        // SAFETY: as in `try_put`.
        ok(unsafe {
            match self.version {
                12 => (GIN_V12.iput_signal)(
                    self.comm,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    word.1,
                    word.0,
                    value,
                    operation,
                    context,
                    &mut request,
                ),
                13 => (GIN_V13.iput_signal)(
                    self.contexts,
                    context,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    word.1,
                    word.0,
                    value,
                    operation,
                    &mut request,
                ),
                _ => (RMA_V14.iput_signal)(
                    self.contexts,
                    context,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    word.1,
                    word.0,
                    value,
                    operation,
                    strong,
                    &mut request,
                ),
            }
        });
        assert!(!request.is_null());
        request
    }

    pub fn signal(&self, context: i32, rank: usize, word: At, value: u64) -> Request {
        self.put_signal(context, NOWHERE, 0, NOWHERE, rank, word, value)
    }

    pub fn get(&self, context: i32, from: At, size: usize, to: At, rank: usize) -> Request {
        let mut request = null_mut();
        let rank = rank as u32;
        // SAFETY: as in `try_put`; version 12 has no gets.
        ok(unsafe {
            match self.version {
                13 => (GIN_V13.iget)(
                    self.contexts,
                    context,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    &mut request,
                ),
                _ => (RMA_V14.iget)(
                    self.contexts,
                    context,
                    from.1,
                    from.0,
                    size,
                    to.1,
                    to.0,
                    rank,
                    &mut request,
                ),
            }
        });
        assert!(!request.is_null());
        request
    }

    pub fn has_gets(&self) -> bool {
        self.version > 12
    }

    pub fn flush(&self, context: i32, memory: *mut c_void, rank: usize) -> Request {
        let mut request = null_mut();
        // SAFETY: as in `try_put`.
        ok(unsafe { (RMA_V14.iflush)(self.contexts, context, memory, rank as u32, &mut request) });
        request
    }

    pub fn progress(&self) -> ResultCode {
        // SAFETY: live objects.
        unsafe {
            match self.version {
                12 => (GIN_V12.progress)(self.comm),
                13 => (GIN_V13.progress)(self.contexts),
                _ => (RMA_V14.progress)(self.contexts),
            }
        }
    }

    pub fn test(&self, request: Request) -> (ResultCode, bool) {
        let mut done = 7;
        // SAFETY: a live connection, a request of it, and a place for the answer.
        let code = unsafe {
            match self.version {
                12 => (GIN_V12.test)(self.comm, request, &mut done),
                13 => (GIN_V13.test)(self.comm, request, &mut done),
                _ => (RMA_V14.test)(self.comm, request, &mut done),
            }
        };
        assert!(done == 0 || done == 1);
        (code, done == 1)
    }

    pub fn has_error(&self) -> bool {
        let mut error = false;
        // SAFETY: as above; what version 12 is given is an object of NCCL's own.
        ok(unsafe {
            match self.version {
                12 => (GIN_V12.query_last_error)(16 as *mut c_void, &mut error),
                13 => (GIN_V13.query_last_error)(self.contexts, &mut error),
                _ => (RMA_V14.query_last_error)(self.contexts, &mut error),
            }
        });
        error
    }

    #[track_caller]
    pub fn wait(&self, request: Request) {
        self.until("a request", || {
            let (code, done) = self.test(request);
            ok(code);
            done
        });
    }

    #[track_caller]
    pub fn wait_all(&self, requests: impl IntoIterator<Item = Request>) {
        for request in requests {
            self.wait(request);
        }
    }

    /// Turns the wheel of NCCL's progress thread until something holds.
    #[track_caller]
    pub fn until(&self, what: &str, mut condition: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !condition() {
            ok(self.progress());
            assert!(Instant::now() < end, "rank {}: {what} did not come within {LIMIT:?}", self.here.rank);
            std::thread::yield_now();
        }
    }

    /// Waits, as a kernel does, until a signal has at least a value.
    #[track_caller]
    pub fn await_word(&self, memory: Memory, offset: usize, value: u64) {
        self.until("a signal", || memory.load(offset) >= value);
    }

    /// Closes in the order of NCCL, and gives the rank back.
    pub fn close(mut self, handles: &[*mut c_void]) -> Rank {
        for &handle in handles {
            self.deregister(handle);
        }
        // SAFETY: live objects, ended once.
        unsafe {
            if !self.contexts.is_null() {
                ok((RMA_V14.destroy_context)(self.contexts));
            }
            if !self.comm.is_null() {
                ok((RMA_V14.close_coll)(self.comm));
            }
            ok((RMA_V14.finalize)(self.plugin));
        }
        (self.contexts, self.comm) = (null_mut(), null_mut());
        self.here
    }
}
