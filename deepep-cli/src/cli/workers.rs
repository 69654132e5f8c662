//! The ranks of a run: child processes of this program, or threads.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

use deepep_cli::process::ended_within;
use deepep_core::bootstrap::{Launch, TcpBootstrap, ThreadBootstrap, thread_group};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Failure;

/// What a rank says, as one line of JSON on its standard output.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum Message<T> {
    /// Rank 0's store listens here.
    Port(u16),
    /// Steps done.
    Progress(usize),
    /// The end.
    Outcome(T),
}

/// Which of a run's processes this is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seat {
    pub(super) rank: usize,
    pub(super) ranks: usize,
    /// Where rank 0's store listens; rank 0 has none yet.
    pub(super) port: Option<u16>,
    /// The longest wait for another rank.
    pub(super) timeout: Duration,
}

enum Event<T> {
    Said(usize, Message<T>),
    /// Standard output is closed; what was written to standard error.
    Silent(usize, String),
}

/// How long ranks have to end by themselves after the first of them has failed or all of them have said how it went, beyond the timeout of
/// their waits; and how long a rank that says nothing more has to end.
const GRACE: Duration = Duration::from_secs(10);

/// How long ranks may work without a word, apart from their waits: large results are compared on slow CPUs.
const WORK: Duration = Duration::from_secs(30 * 60);

/// And for each call that a step makes.
const CALL: Duration = Duration::from_secs(10);

/// How long a killed process has to go.
const KILLED: Duration = Duration::from_secs(2);

/// Plays a rank in this process: the other end of [`processes`]. Returns what it has told, too.
pub(super) fn child<T: Serialize>(
    seat: &Seat,
    work: impl FnOnce(TcpBootstrap, &dyn Fn(usize)) -> T,
) -> Result<T, Failure> {
    fn say<T: Serialize>(message: &Message<&T>) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        serde_json::to_writer(&mut out, message)?;
        out.write_all(b"\n")?;
        Ok(out.flush()?)
    }
    let bootstrap = match seat.port {
        None => {
            let listener = TcpListener::bind(("127.0.0.1", 0))?;
            say::<()>(&Message::Port(listener.local_addr()?.port()))?;
            TcpBootstrap::serve(listener, seat.ranks, seat.timeout)?
        }
        Some(master_port) => {
            let (rank, world_size) = (seat.rank, seat.ranks);
            let master_addr = "127.0.0.1".to_owned();
            let launch = Launch { rank, world_size, local_rank: Some(rank), master_addr, master_port };
            TcpBootstrap::join(&launch, seat.timeout)?
        }
    };
    let outcome = work(bootstrap, &|done| {
        // Without a parent that listens there is nobody to tell.
        let _ = say::<()>(&Message::Progress(done));
    });
    say(&Message::Outcome(&outcome))?;
    Ok(outcome)
}

/// Runs every rank as a thread of this process. A rank that panicked is an error.
pub(super) fn threads<T: Send>(
    ranks: usize,
    timeout: Duration,
    work: impl Fn(ThreadBootstrap) -> T + Sync,
) -> Result<Vec<Result<T, String>>, Failure> {
    let group = thread_group(ranks, timeout)?;
    let work = &work;
    Ok(thread::scope(|scope| {
        let running: Vec<_> =
            group.into_iter().map(|bootstrap| scope.spawn(move || work(bootstrap))).collect();
        running
            .into_iter()
            .map(|rank| rank.join().map_err(|_| "the rank's thread panicked".to_owned()))
            .collect()
    }))
}

/// Starts this program once for each rank, with the same arguments, `more` of them and its rank, and collects what they say; a rank that
/// ends without an outcome is an error. After the first outcome that is not `good`, and after the last, ranks have a limited time to end; before
/// that, they may say nothing for [`silence`]. Children are killed at the end, and left behind only if they can't be.
pub(super) fn processes<T: DeserializeOwned + Send + 'static>(
    ranks: usize,
    more: &[String],
    timeout: Duration,
    silence: Duration,
    progress: &dyn Fn(usize),
    good: impl Fn(&T) -> bool,
) -> Result<Vec<Result<T, String>>, Failure> {
    let (sender, events) = mpsc::channel();
    let mut children = Children(Vec::new());
    children.start(0, more, None, &sender)?;
    let port = match events.recv_timeout(timeout + GRACE) {
        Ok(Event::Said(0, Message::Port(port))) => port,
        Ok(Event::Silent(_, words)) => return Err(format!("rank 0 ended at once: {}", words.trim()).into()),
        Ok(_) | Err(_) => return Err("rank 0 did not say where its store listens".into()),
    };
    for rank in 1..ranks {
        children.start(rank, more, Some(port), &sender)?;
    }
    drop(sender);

    let mut outcomes: Vec<Option<Result<T, String>>> = (0..ranks).map(|_| None).collect();
    let mut ended = 0;
    let mut patience = Patience::new(silence, timeout + GRACE);
    while ended < ranks {
        // Else out of time, or nobody is left to say anything.
        let Ok(event) = events.recv_timeout(patience.left()) else { break };
        match event {
            Event::Said(_, Message::Progress(_)) => progress(1),
            Event::Said(_, Message::Port(_)) => {}
            Event::Said(rank, Message::Outcome(outcome)) => outcomes[rank] = Some(Ok(outcome)),
            Event::Silent(rank, words) => {
                ended += 1;
                let status = ended_within(&mut children.0[rank], GRACE)?;
                outcomes[rank].get_or_insert_with(|| Err(last_words(status, &words)));
            }
        }
        let failed = outcomes.iter().flatten().any(|outcome| !outcome.as_ref().is_ok_and(&good));
        patience.heard(failed || outcomes.iter().all(Option::is_some));
    }
    let unheard = || Err("the rank did not end in time and was killed".to_owned());
    Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(unheard)).collect())
}

/// How long ranks are listened to.
struct Patience {
    silence: Duration,
    end: Duration,
    deadline: Instant,
    ending: bool,
}

impl Patience {
    /// Ranks may say nothing for `silence`; once they are to end, they have `end` for it.
    fn new(silence: Duration, end: Duration) -> Self {
        Self { silence, end, deadline: Instant::now() + silence, ending: false }
    }

    fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// A rank has said something; from the first time on that they are `to_end` nothing more is granted.
    fn heard(&mut self, to_end: bool) {
        if !self.ending {
            self.ending = to_end;
            self.deadline = Instant::now() + if to_end { self.end } else { self.silence };
        }
    }
}

/// How long ranks may say nothing between two steps, the longer of which makes this many calls.
pub(super) fn silence(timeout: Duration, calls: usize) -> Duration {
    let calls = u32::try_from(calls).unwrap_or(u32::MAX);
    WORK.saturating_add(timeout.saturating_mul(4)).saturating_add(CALL.saturating_mul(calls))
}

fn last_words(status: Option<ExitStatus>, words: &str) -> String {
    let end = match status {
        Some(status) => format!("the rank ended with {status}"),
        None => "the rank fell silent, did not end, and was killed".into(),
    };
    match words.trim() {
        "" => end,
        words => format!("{end}: {words}"),
    }
}

/// Child processes, killed when dropped.
struct Children(Vec<Child>);

impl Children {
    fn start<T: DeserializeOwned + Send + 'static>(
        &mut self,
        rank: usize,
        more: &[String],
        port: Option<u16>,
        sender: &Sender<Event<T>>,
    ) -> Result<(), Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).args(more).arg("--as-rank").arg(rank.to_string());
        if let Some(port) = port {
            command.arg("--store-port").arg(port.to_string());
        }
        let pipes = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = pipes.spawn().map_err(|e| format!("starting rank {rank}: {e}"))?;
        let (out, err) = (child.stdout.take(), child.stderr.take());
        self.0.push(child);
        let (Some(out), Some(mut err)) = (out, err) else { return Err("a rank has no pipes".into()) };
        let words = thread::spawn(move || {
            let mut words = Vec::new();
            // Whatever could be read is worth showing.
            let _ = err.read_to_end(&mut words);
            String::from_utf8_lossy(&words).into_owned()
        });
        let sender = sender.clone();
        thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if let Ok(message) = serde_json::from_str(&line)
                    && sender.send(Event::Said(rank, message)).is_err()
                {
                    return;
                }
            }
            let words = words.join().unwrap_or_default();
            // Nobody listens any more: then nobody needs to know.
            let _ = sender.send(Event::Silent(rank, words));
        });
        Ok(())
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // Either it is gone, or it is killed now.
            let _ = child.kill();
        }
        for child in &mut self.0 {
            // What the driver holds on to can't be killed, and is left behind.
            let _ = ended_within(child, KILLED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_ends_and_so_does_an_end() {
        let (silence, end) = (Duration::from_secs(1000), Duration::from_secs(10));
        let mut patience = Patience::new(silence, end);
        assert!(patience.left() <= silence && patience.left() > silence / 2);
        patience.deadline = Instant::now();
        assert_eq!(patience.left(), Duration::ZERO);
        patience.heard(false);
        assert!(patience.left() > silence / 2, "every word counts");
        patience.heard(true);
        let left = patience.left();
        assert!(left <= end && left > end / 2, "{left:?}");
        patience.heard(false);
        patience.heard(true);
        assert!(patience.left() <= left, "nothing is added to the end");
    }

    #[test]
    fn any_timeout_and_number_of_calls_is_bounded() {
        let day = Duration::from_secs(24 * 3600);
        let most = silence(day, u32::MAX as usize);
        assert!(most > 4 * day);
        assert!(Patience::new(most, day).left() > 4 * day);
    }

    #[test]
    fn last_words_say_how_a_rank_ended() {
        let status = Some(std::os::unix::process::ExitStatusExt::from_raw(9));
        assert_eq!(last_words(status, " "), "the rank ended with signal: 9 (SIGKILL)");
        assert_eq!(last_words(None, "x\n"), "the rank fell silent, did not end, and was killed: x");
    }
}
