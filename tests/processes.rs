//! Ranks as real processes: one that is killed, stopped, slow or started anew is an error on every other rank within a second, or
//! no error at all; never a hang.
#![cfg(feature = "cli")]

mod parallel {
    pub mod processes;
}
mod serving;

use std::process::Command;
use std::time::{Duration, Instant};

use capstan::random::Random;
use parallel::processes::{Rank, end_all, free_port, start, start_all};
use serde_json::Value;

/// Longest wait of a rank for another, milliseconds.
const TIMEOUT: u32 = 500;
/// Survivors have ended by then: the timeout, and what a loaded machine takes to end processes.
const SOON: Duration = Duration::from_millis(1000);

/// Every rank but `gone` has failed since `start`, soon, and says who is missing or which rank ended the group.
fn all_but_one_fail(ranks: Vec<Rank>, gone: usize, start: Instant) {
    let mut named = false;
    for (rank, ended) in end_all(ranks, Duration::from_secs(10)).into_iter().enumerate().filter(|(rank, _)| *rank != gone) {
        let took = ended.at.duration_since(start);
        assert!(took < SOON, "rank {rank} took {took:?}: {}", ended.stderr);
        assert_eq!(ended.code, Some(1), "rank {rank}: {}", ended.stderr);
        let missing = format!("rank {gone} did not");
        let of_ended = ended.stderr.contains("the group was ended by rank");
        assert!(ended.stderr.contains(&missing) || of_ended, "rank {rank}: {}", ended.stderr);
        assert!(ended.stderr.contains("help:"), "rank {rank}: {}", ended.stderr);
        named |= ended.stderr.contains(&missing);
    }
    assert!(named, "nobody says that rank {gone} is missing");
}

#[test]
fn a_rank_killed_in_the_middle_of_a_replay_ends_the_others_within_a_second() {
    let mut random = Random::new(serving::seed(21));
    for world in [2, 4, 4] {
        let mut ranks = start_all(world, &["--steps", "1000000000"], TIMEOUT);
        ranks.iter_mut().for_each(Rank::await_replays);
        let gone = random.range(0, world - 1) as usize;
        // Somewhere within a step, which takes about a millisecond.
        std::thread::sleep(Duration::from_micros(u64::from(random.range(20_000, 60_000))));
        let start = Instant::now();
        ranks[gone].kill();
        all_but_one_fail(ranks, gone, start);
    }
}

#[test]
fn a_rank_that_stops_is_named_and_learns_of_it_when_it_goes_on() {
    let mut ranks = start_all(2, &["--steps", "1000000000"], TIMEOUT);
    ranks.iter_mut().for_each(Rank::await_replays);
    let signal = |name: &str, rank: &Rank| {
        let sent = Command::new("kill").args([name, &rank.id().to_string()]).status().expect("kill runs");
        assert!(sent.success());
    };
    let start = Instant::now();
    signal("-STOP", &ranks[1]);
    let first = ranks.remove(0).end(Duration::from_secs(10));
    assert!(first.at.duration_since(start) < SOON, "{:?}", first.at.duration_since(start));
    assert!(first.code == Some(1) && first.stderr.contains("rank 1 did not"), "{}", first.stderr);
    signal("-CONT", &ranks[0]);
    let start = Instant::now();
    let second = ranks.remove(0).end(Duration::from_secs(10));
    assert!(second.at.duration_since(start) < SOON, "{:?}", second.at.duration_since(start));
    assert!(second.code == Some(1) && second.stderr.contains("the group was ended by rank 0"), "{}", second.stderr);
}

#[test]
fn a_slow_rank_is_waited_for() {
    let port = free_port();
    let steps = ["--steps", "150"];
    let slow = ["--steps", "150", "--skew-us", "15000"];
    let ranks: Vec<Rank> = (0..4).map(|rank| start(port, rank, 4, if rank == 2 { &slow } else { &steps }, 5000)).collect();
    for (rank, ended) in end_all(ranks, Duration::from_secs(60)).into_iter().enumerate() {
        assert_eq!(ended.code, Some(0), "rank {rank}: {}", ended.stderr);
    }
}

#[test]
fn a_rank_that_restarts_is_turned_away_and_a_group_started_anew_runs() {
    let port = free_port();
    let endless = ["--steps", "1000000000", "--join-timeout-ms", "20000"];
    let mut ranks: Vec<Rank> = (0..4).map(|rank| start(port, rank, 4, &endless, TIMEOUT)).collect();
    ranks.iter_mut().for_each(Rank::await_replays);
    // A second process of a rank that is alive, then the restart of one that was killed.
    let second = start(port, 1, 4, &endless, TIMEOUT).end(Duration::from_secs(20));
    assert!(second.code == Some(1) && second.stderr.contains("the group has begun"), "{}", second.stderr);
    let start_of_end = Instant::now();
    ranks[1].kill();
    let restarted = start(port, 1, 4, &["--steps", "5", "--join-timeout-ms", "1500"], TIMEOUT);
    all_but_one_fail(ranks, 1, start_of_end);
    let restarted = restarted.end(Duration::from_secs(10));
    assert_eq!(restarted.code, Some(1));
    let told = restarted.stderr.contains("the group has begun") || restarted.stderr.contains("rank 0 did not come");
    assert!(told, "{}", restarted.stderr);
    // The same port, the same secret, nothing left over.
    let anew: Vec<Rank> = (0..4).map(|rank| start(port, rank, 4, &["--steps", "5"], 5000)).collect();
    for ended in end_all(anew, Duration::from_secs(60)) {
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
}

#[test]
fn ranks_with_other_limits_do_not_start() {
    let port = free_port();
    let lens = ["--max-num-seqs", "6"];
    let odd = ["--max-num-seqs", "5"];
    let ranks: Vec<Rank> = (0..2).map(|rank| start(port, rank, 2, if rank == 1 { &odd } else { &lens }, TIMEOUT)).collect();
    for ended in end_all(ranks, Duration::from_secs(30)) {
        assert_eq!(ended.code, Some(3), "{}", ended.stderr);
        assert!(ended.stderr.contains("rank 0 has") && ended.stderr.contains("rank 1 has"), "{}", ended.stderr);
    }
}

/// Ranks that are late at random, every step compared with one rank alone; the command starts them itself.
fn replays(kind: &str, world: u32, steps: u32) {
    let seed = serving::seed(22);
    let output = Command::new(env!("CARGO_BIN_EXE_capstan"))
        .args(["verify", "--json", "--device", "cpu", "--ranks", kind, "--skew-us", "120", "--peer-timeout-ms", "20000"])
        .args(["--world", &world.to_string(), "--steps", &steps.to_string(), "--seed", &seed.to_string()])
        .output()
        .expect("the program runs");
    assert!(output.status.success(), "{world} {kind}: {}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).expect("one report, of all ranks");
    let ranks = report["ranks"].as_array().expect("ranks are a list");
    assert_eq!(ranks.len(), world as usize);
    for (at, rank) in ranks.iter().enumerate() {
        assert_eq!((rank["rank"].as_u64(), rank["steps"].as_u64()), (Some(at as u64), Some(u64::from(steps))));
        assert!(rank["rows_compared"].as_u64() > Some(u64::from(steps)), "{rank}");
    }
}

#[test]
fn replays_with_random_skew_lose_nothing() {
    for kind in ["threads", "processes"] {
        replays(kind, 2, 1000);
        replays(kind, 4, 500);
    }
}

#[test]
#[ignore = "takes several minutes: cargo test --test processes -- --ignored"]
fn a_hundred_thousand_replays_with_random_skew_lose_nothing() {
    for kind in ["threads", "processes"] {
        replays(kind, 2, 100_000);
    }
}

/// What a process with these variables says, and that it says so soon.
fn refused(variables: &[(&str, &str)], world: &str, code: i32, says: &[&str]) {
    let start = Instant::now();
    let mut command = Command::new(env!("CARGO_BIN_EXE_capstan"));
    command.args(["verify", "--device", "cpu", "--ranks", "processes", "--steps", "5", "--join-timeout-ms", "300"]);
    command.args(["--world", world]).env("CAPSTAN_SECRET", "s").envs(variables.iter().copied());
    let output = command.output().expect("the program runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{variables:?}: {said}");
    assert!(says.iter().chain(&["help:"]).all(|word| said.contains(word)), "{variables:?}: {said}");
    assert!(start.elapsed() < Duration::from_secs(5), "{variables:?} took {:?}", start.elapsed());
}

#[test]
fn variables_that_cannot_be_right_are_named_and_nobody_waits_for_ever() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap().port().to_string();
    let free = free_port().to_string();
    let of = |rank, port| [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_PORT", port)];
    refused(&of("2", &free), "2", 2, &["RANK = 2", "WORLD_SIZE = 2"]);
    refused(&of("0", "0"), "2", 2, &["MASTER_PORT"]);
    refused(&of("0", &free), "4", 2, &["--world 4", "rank 0 of 2"]);
    refused(&[&of("0", &free)[..], &[("CAPSTAN_SECRET", "")]].concat(), "2", 2, &["CAPSTAN_SECRET"]);
    refused(&[("RANK", "0"), ("WORLD_SIZE", "1")], "1", 2, &["there is one rank"]);
    // Rank 0 where something else listens; rank 1 that something else answers with silence; each rank alone.
    refused(&of("0", &taken), "2", 1, &["cannot listen", &taken, "MASTER_PORT"]);
    refused(&of("1", &taken), "2", 1, &["rank 0 did not come", "within 0.3 s"]);
    refused(&of("0", &free), "2", 1, &["rank 1 did not come", "within 0.3 s"]);
    refused(&of("1", &free), "2", 1, &["rank 0 did not come", "MASTER_ADDR"]);
}

#[test]
fn recorded_cases_are_shared_by_threads_and_processes() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/fixtures/indexer");
    let Ok(entries) = std::fs::read_dir(&folder) else { return println!("skipped: {} is not there", folder.display()) };
    let files: Vec<_> = entries.map(|entry| entry.expect("a readable folder").path()).collect();
    for kind in ["threads", "processes"] {
        let output = Command::new(env!("CARGO_BIN_EXE_capstan"))
            .args(["verify", "--json", "--device", "cpu", "--world", "4", "--ranks", kind, "--peer-timeout-ms", "20000"])
            .args(&files)
            .output()
            .expect("the program runs");
        assert!(output.status.success(), "{kind}: {}", String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).expect("one report, of all ranks");
        let cases = report["cases"].as_array().expect("cases are a list");
        assert_eq!(cases.len(), 4 * files.len());
        let shared = cases.iter().filter(|case| case["compared"].as_u64() > Some(0)).count();
        assert_eq!(shared, 4 * 2, "two files have four heads: {cases:?}");
    }
}

#[test]
fn launch_starts_every_rank_and_fails_with_the_first_that_does() {
    let launch = |script: &str| {
        let args = ["launch", "--world", "3", "--", "sh", "-c", script];
        Command::new(env!("CARGO_BIN_EXE_capstan")).args(args).output().expect("the program runs")
    };
    let output = launch("echo $RANK/$WORLD_SIZE/$LOCAL_RANK at $MASTER_ADDR:$MASTER_PORT with $CAPSTAN_SECRET");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    assert!(lines.iter().zip(0..3).all(|(line, rank)| line.starts_with(&format!("{rank}/3/{rank} at 127.0.0.1:"))), "{text}");
    let places: Vec<&str> = lines.iter().filter_map(|line| line.split_once(' ')).map(|(_, place)| place).collect();
    assert!(places.len() == 3 && places.iter().all(|place| *place == places[0]), "one port, one secret: {text}");
    let output = launch("exit $((RANK * 7))");
    assert_eq!(output.status.code(), Some(7));
    assert!(String::from_utf8_lossy(&output.stderr).contains("rank 1"), "{output:?}");
}
