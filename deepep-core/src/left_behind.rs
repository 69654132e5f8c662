//! What is dropped while somebody may still use it stays until the process ends. The program is told of the first time.

use std::fmt::Arguments;
use std::io::Write as _;
use std::sync::Once;

/// Says on standard error, once in a process, that something stays.
pub(crate) fn say(what: Arguments<'_>) {
    static SAID: Once = Once::new();
    // Whoever has closed standard error does not want to know.
    SAID.call_once(|| drop(writeln!(std::io::stderr(), "deepep-core: {what}")));
}
