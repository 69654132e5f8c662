//! The ranks of a run: child processes of this program, or threads.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

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

/// How long ranks have to end by themselves after the first of them has failed, beyond the timeout of their waits.
const GRACE: Duration = Duration::from_secs(10);

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
/// ends without an outcome is an error. After the first outcome that is not `good` the others have a limited time. Children are
/// never left behind.
pub(super) fn processes<T: DeserializeOwned + Send + 'static>(
    ranks: usize,
    more: &[String],
    timeout: Duration,
    progress: &dyn Fn(usize),
    good: impl Fn(&T) -> bool,
) -> Result<Vec<Result<T, String>>, Failure> {
    let (sender, events) = mpsc::channel();
    let mut children = Children(Vec::new());
    children.start(0, more, None, &sender)?;
    let port = match events.recv_timeout(timeout) {
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
    let mut deadline: Option<Instant> = None;
    while ended < ranks {
        let patience = match deadline {
            Some(deadline) => deadline.saturating_duration_since(Instant::now()),
            None => Duration::from_secs(3600),
        };
        let event = match events.recv_timeout(patience) {
            Ok(event) => event,
            Err(RecvTimeoutError::Timeout) if deadline.is_some() => break,
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        match event {
            Event::Said(_, Message::Progress(_)) => progress(1),
            Event::Said(_, Message::Port(_)) => {}
            Event::Said(rank, Message::Outcome(outcome)) => outcomes[rank] = Some(Ok(outcome)),
            Event::Silent(rank, words) => {
                ended += 1;
                let status = children.0[rank].wait()?;
                outcomes[rank].get_or_insert_with(|| Err(last_words(status, &words)));
            }
        }
        let failed = outcomes.iter().flatten().any(|outcome| !outcome.as_ref().is_ok_and(&good));
        if failed && deadline.is_none() {
            deadline = Some(Instant::now() + timeout + GRACE);
        }
    }
    let unheard = || Err("the rank did not end in time and was killed".to_owned());
    Ok(outcomes.into_iter().map(|outcome| outcome.unwrap_or_else(unheard)).collect())
}

fn last_words(status: ExitStatus, words: &str) -> String {
    let words = words.trim();
    if words.is_empty() {
        format!("the rank ended with {status}")
    } else {
        format!("the rank ended with {status}: {words}")
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
            if let Ok(None) = child.try_wait() {
                // Either it is gone, or it is killed now.
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}
