//! What `deepep bench` is made of: ceilings of the hardware, a plan, ranks that verify and time, and a report.

mod calls;
pub mod ceilings;
mod clock;
pub mod cpu_time;
pub mod machine;
pub mod plan;
pub mod rank;
pub mod report;
pub mod stats;
pub mod svg;
