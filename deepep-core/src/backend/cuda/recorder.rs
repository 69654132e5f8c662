//! A driver for tests of what calls ask of one: the one in software, with kernels that do nothing but what a test says. Every call is noted, and any of
//! them can be made to fail.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_void};
use std::mem::transmute;
use std::rc::Rc;
use std::sync::Arc;

use cuda_vmm::Cuda;
use cuda_vmm::sys::{CUfunction, CUlaunchConfig, CUresult, Driver, Function, for_each_function};
use cuda_vmm_emu::{Config, Emulator, Kernel, Kernels, Launch, Module};

use super::module::unload_all;
use super::pinned::free_all;

/// Every image, and every kernel of it: takes no time, and does nothing.
pub(super) struct Nothing;

impl Kernels for Nothing {
    unsafe fn load(&self, _: *const c_void) -> Result<Box<dyn Module>, CUresult> {
        Ok(Box::new(Self))
    }
}

impl Module for Nothing {
    fn function(&self, _: &CStr) -> Option<Arc<dyn Kernel>> {
        Some(Arc::new(Self))
    }
}

impl Kernel for Nothing {
    fn parameters(&self) -> &[usize] {
        &[]
    }

    fn run(&self, _: &Launch) -> Result<(), CUresult> {
        Ok(())
    }
}

/// What a launch does, given how it is launched and the kernel's parameter struct. It is done at once, whatever the stream waits for.
type Launched = Box<dyn FnMut(&CUlaunchConfig, *const c_void)>;

/// The driver of one test, on its thread only.
pub(super) struct Recorder {
    layer: Rc<Layer>,
}

/// What the driver's functions, which know nothing but their thread, work with.
struct Layer {
    below: Driver,
    calls: RefCell<Vec<Function>>,
    /// Calls before the one that fails, and how it does.
    fails: Cell<Option<(usize, CUresult)>>,
    /// A function whose next call fails, and how.
    fails_next: Cell<Option<(Function, CUresult)>>,
    kernel: RefCell<Option<Launched>>,
}

thread_local! {
    static LAYER: RefCell<Option<Rc<Layer>>> = const { RefCell::new(None) };
}

impl Recorder {
    /// Runs a test on two devices. At its end everything that it made is gone.
    pub(super) fn run(test: impl FnOnce(&Self, &Cuda)) {
        Self::run_leaving(|recorder, cuda| test(recorder, cuda)).assert_empty();
    }

    /// The same for a test that leaves something behind: what, the emulator knows.
    pub(super) fn run_leaving(test: impl FnOnce(&Self, &Cuda)) -> Emulator {
        let emulator = Emulator::new(Config::h200x2().kernels(Arc::new(Nothing))).unwrap();
        let layer = Rc::new(Layer {
            below: emulator.driver(),
            calls: RefCell::default(),
            fails: Cell::default(),
            fails_next: Cell::default(),
            kernel: RefCell::default(),
        });
        LAYER.set(Some(layer.clone()));
        let recorder = Self { layer };
        {
            // SAFETY: `address` gives functions with the C ABI and the signatures of the list that the table is made from, for the names of that list.
            // They are code of this file; on other threads than the test's they are a driver that has shut down.
            let driver = unsafe { Driver::from_loader(address_by_name) }.unwrap();
            let cuda = Cuda::with_driver(driver).unwrap();
            test(&recorder, &cuda);
            *recorder.layer.kernel.borrow_mut() = None;
            for device in cuda.devices().unwrap() {
                let context = device.primary_context().unwrap();
                unload_all(&context);
                free_all(&context);
            }
        }
        LAYER.set(None);
        emulator
    }

    /// The calls that a body makes.
    pub(super) fn calls<T>(&self, body: impl FnOnce() -> T) -> (T, Vec<Function>) {
        self.layer.calls.borrow_mut().clear();
        let result = body();
        (result, self.layer.calls.take())
    }

    /// Makes one call fail, after `before` others.
    pub(super) fn fail(&self, before: usize, code: CUresult) {
        self.layer.fails.set(Some((before, code)));
    }

    /// Makes the next call of one function fail.
    pub(super) fn fail_next(&self, function: Function, code: CUresult) {
        self.layer.fails_next.set(Some((function, code)));
    }

    /// Whether a call that was to fail has not come yet; it does not fail any more.
    pub(super) fn spare(&self) -> bool {
        self.layer.fails.take().is_some() | self.layer.fails_next.take().is_some()
    }

    /// What kernels do from now on.
    pub(super) fn on_launch(&self, kernel: impl FnMut(&CUlaunchConfig, *const c_void) + 'static) {
        *self.layer.kernel.borrow_mut() = Some(Box::new(kernel));
    }
}

/// One call.
fn enter(function: Function, body: impl FnOnce(&Layer) -> CUresult) -> CUresult {
    let Some(layer) = LAYER.try_with(|layer| layer.borrow().clone()).ok().flatten() else {
        return CUresult::CUDA_ERROR_DEINITIALIZED;
    };
    layer.calls.borrow_mut().push(function);
    if let Some((next, code)) = layer.fails_next.get()
        && next == function
    {
        layer.fails_next.set(None);
        return code;
    }
    match layer.fails.get() {
        Some((0, code)) => {
            layer.fails.set(None);
            return code;
        }
        Some((before, code)) => layer.fails.set(Some((before - 1, code))),
        None => {}
    }
    body(&layer)
}

/// What the driver below does not do.
mod instead {
    use super::*;

    pub(super) unsafe extern "C" fn launch(
        config: *const CUlaunchConfig,
        function: CUfunction,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> CUresult {
        enter(Function::cuLaunchKernelEx, |layer| {
            if let Some(kernel) = &mut *layer.kernel.borrow_mut() {
                // SAFETY: the caller's contract: there is one parameter.
                let (config, parameters) = unsafe { (&*config, parameters.read()) };
                kernel(config, parameters);
            }
            // SAFETY: the caller's contract.
            match unsafe { layer.below.cuLaunchKernelEx(config, function, parameters, extra) } {
                Ok(()) => CUresult::CUDA_SUCCESS,
                Err(error) => error.status().unwrap_or(CUresult::CUDA_ERROR_NOT_FOUND),
            }
        })
    }
}

macro_rules! shims {
    ($(
        $(#[$doc:meta])*
        $method:ident = $name:literal, $symbol:literal, $since:literal: fn($($argument:ident: $type:ty),* $(,)?);
    )*) => {
        /// Functions of the driver below.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        mod below {
            use super::*;
            $(
                pub(super) unsafe extern "C" fn $method($($argument: $type),*) -> CUresult {
                    enter(Function::$method, |layer| {
                        let Ok(address) = layer.below.address(Function::$method) else {
                            return CUresult::CUDA_ERROR_NOT_FOUND;
                        };
                        // SAFETY: that is the signature with which the table calls it.
                        let function = unsafe {
                            transmute::<*const c_void, unsafe extern "C" fn($($type),*) -> CUresult>(address)
                        };
                        // SAFETY: the caller's contract.
                        unsafe { function($($argument),*) }
                    })
                }
            )*
        }

        #[allow(unreachable_patterns)] // What is done instead comes first.
        fn address(function: Function) -> *const c_void {
            match function {
                Function::cuLaunchKernelEx => instead::launch as *const c_void,
                $(Function::$method => below::$method as *const c_void,)*
                _ => std::ptr::null(),
            }
        }
    };
}

for_each_function!(shims);

fn address_by_name(name: &CStr) -> *const c_void {
    let found = Function::ALL.iter().find(|function| function.symbol().as_bytes() == name.to_bytes());
    found.map_or(std::ptr::null(), |&function| address(function))
}
