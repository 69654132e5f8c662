//! Child processes that are waited for, but not for ever.

use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const PAUSE: Duration = Duration::from_millis(5);

/// How a child ended, if it does so in time.
///
/// # Errors
/// Of the system.
pub fn ended_within(child: &mut Child, limit: Duration) -> io::Result<Option<ExitStatus>> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let waited = start.elapsed();
        if waited >= limit {
            return Ok(None);
        }
        thread::sleep(PAUSE.min(limit - waited));
    }
}

/// What a command writes to its standard output, if it ends in time and well: at most what a pipe holds, since it is read at the end. A
/// command that does not end in time is killed.
pub fn short_output(command: &mut Command, limit: Duration) -> Option<String> {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = quiet.spawn().ok()?;
    match ended_within(&mut child, limit) {
        Ok(Some(status)) if status.success() => {
            let mut told = String::new();
            child.stdout.take()?.read_to_string(&mut told).ok()?;
            Some(told)
        }
        Ok(Some(_)) => None,
        Ok(None) | Err(_) => {
            // Either it is gone, or it ends now; one that the driver holds on to is left behind.
            let _ = child.kill();
            let _ = ended_within(&mut child, Duration::from_secs(1));
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn what_ends_in_time_is_read() {
        assert_eq!(short_output(&mut shell("echo 580.1"), LONG).as_deref(), Some("580.1\n"));
        assert_eq!(short_output(&mut shell("echo 580.1; exit 3"), LONG), None);
        assert_eq!(short_output(&mut Command::new("/no/such/program"), LONG), None);
    }

    #[test]
    fn what_does_not_end_is_killed() {
        let start = Instant::now();
        assert_eq!(short_output(&mut shell("echo 580.1; exec sleep 60"), Duration::from_millis(100)), None);
        assert!(start.elapsed() < LONG, "{:?}", start.elapsed());
    }

    #[test]
    fn the_status_of_what_ends() {
        let mut child = shell("exit 7").spawn().unwrap();
        assert_eq!(ended_within(&mut child, LONG).unwrap().and_then(|status| status.code()), Some(7));
        let mut child = shell("exec sleep 60").spawn().unwrap();
        assert!(ended_within(&mut child, Duration::from_millis(20)).unwrap().is_none());
        child.kill().unwrap();
        assert!(ended_within(&mut child, LONG).unwrap().is_some());
    }
}
