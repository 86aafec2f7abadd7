use proptest::prelude::*;

use super::*;

const TERMS: Terms =
    Terms { cost: GraphCost { fixed_bytes: 4 << 20, node_bytes: 0 }, nodes: 1, percent_worth_bytes: Terms::PERCENT_WORTH_BYTES };

fn limits(max_num_seqs: u32, num_speculative_tokens: u32) -> Limits {
    Limits { max_num_seqs, num_speculative_tokens, ..Limits::default() }
}

/// Padded rows plus `graph_rows` a size, added up naively.
fn cost(filled: &[(u32, u64)], sizes: &[u32], graph_rows: u64) -> u64 {
    let pad = |&(rows, steps): &(u32, u64)| {
        let size = sizes.iter().find(|&&size| size >= rows).expect("the largest size is always taken");
        u64::from(size - rows) * steps
    };
    filled.iter().map(pad).sum::<u64>() + graph_rows * sizes.len() as u64
}

proptest! {
    #[test]
    fn no_other_ladder_is_cheaper(
        filled in prop::collection::btree_map(1u32..64, 0u64..50, 1..10),
        graph_rows in 0u64..400,
    ) {
        let filled: Vec<(u32, u64)> = filled.into_iter().collect();
        let found = best(&filled, graph_rows);
        prop_assert_eq!(found.last(), filled.last().map(|(rows, _)| rows));
        // Every set of sizes up to the largest that ends in it, whether a step fills them or not.
        let last = filled.len() - 1;
        let all = (0u32..1 << last).map(|set| {
            let sizes: Vec<u32> = (0..filled.len()).filter(|&at| at == last || set >> at & 1 == 1).map(|at| filled[at].0).collect();
            cost(&filled, &sizes, graph_rows)
        });
        prop_assert_eq!(cost(&filled, &found, graph_rows), all.min().unwrap());
    }

    #[test]
    fn sizes_that_no_step_fills_never_help(
        filled in prop::collection::btree_map(1u32..10, 1u64..20, 1..5),
        graph_rows in 0u64..60,
    ) {
        let filled: Vec<(u32, u64)> = filled.into_iter().collect();
        let largest = filled[filled.len() - 1].0;
        let all = (0u32..1 << (largest - 1)).map(|set| {
            let sizes: Vec<u32> = (1..=largest).filter(|&size| size == largest || set >> (size - 1) & 1 == 1).collect();
            cost(&filled, &sizes, graph_rows)
        });
        prop_assert_eq!(cost(&filled, &best(&filled, graph_rows), graph_rows), all.min().unwrap());
    }

    #[test]
    fn advice_is_a_ladder_of_its_limits_and_never_dearer_than_the_policy(
        pairs in prop::collection::vec((1u32..=96, 1u64..10_000), 1..40),
        speculative in 0u32..4,
        worth in 1u64..1 << 32,
    ) {
        let limits = limits(96, speculative);
        let histogram = BatchHistogram::new(pairs);
        let terms = Terms { percent_worth_bytes: worth, ..TERMS };
        let advised = advise(&histogram, &limits, &terms).unwrap();
        let query_len = 1 + speculative;
        prop_assert!(advised.sizes.iter().all(|size| size % query_len == 0));
        prop_assert_eq!((advised.sizes.last(), advised.eager_steps), (Some(&(96 * query_len)), 0));
        // Limits take the advice as it is.
        let taken = Limits { capture: crate::config::CaptureSizes::List(advised.sizes.clone()), ..limits.clone() };
        let ladder = Ladder::new(&taken).unwrap();
        prop_assert_eq!(ladder.sizes(), &advised.sizes[..]);
        let policy = price_ladder(&histogram, &limits, &terms).unwrap();
        let graph_rows = u128::from(terms.rows_a_graph(histogram.live_rows()));
        let whole = |cost: &LadderCost| u128::from(cost.pad_rows) + graph_rows * cost.sizes.len() as u128;
        prop_assert!(whole(&advised) <= whole(&policy), "{advised:?} against {policy:?}");
    }
}

#[test]
fn traffic_of_two_sizes_asks_for_two_graphs_and_the_full_batch() {
    let histogram = BatchHistogram::new([(7, 1000), (30, 1000)]);
    let advised = advise(&histogram, &limits(64, 0), &TERMS).unwrap();
    assert_eq!((advised.sizes, advised.pad_rows, advised.graph_bytes), (vec![7, 30, 64], 0, 12 << 20));
    // Memory that is dear leaves one graph.
    let dear = Terms { percent_worth_bytes: 1, ..TERMS };
    let advised = advise(&histogram, &limits(64, 0), &dear).unwrap();
    assert_eq!((advised.sizes, advised.pad_rows), (vec![64], 1000 * (57 + 34)));
    let error = advise(&histogram, &limits(16, 0), &TERMS).unwrap_err();
    assert!(error.help_line().unwrap().contains("max_num_seqs to 30"), "{error}");
}

#[test]
fn histograms_are_read_from_lines_and_json() {
    let expected = BatchHistogram::new([(1, 10), (8, 3)]);
    for text in [
        "# rows steps\n1 4\n8 3 # full\n\n1 6\n",
        "[[1, 10], [8, 3]]",
        "{\"batch_rows\": [[1, 10], [8, 3]]}",
        "{\"metrics\": {\"batch_rows\": [[8, 3], [1, 10]]}}",
    ] {
        assert_eq!(BatchHistogram::parse(text).unwrap(), expected, "{text}");
    }
    assert_eq!((expected.live_rows(), expected.steps()), (34, 13));
    for (text, named) in [
        ("1 2\n3\n", "line 2"),
        ("1 -2\n", "line 1"),
        ("{\"rows\": 1}", "batch_rows"),
        ("[[1, 2, 3]]", "[1,2,3]"),
        ("{", "no JSON"),
        ("0 5\n", "no step"),
        ("", "no step"),
    ] {
        let error = BatchHistogram::parse(text).unwrap_err();
        assert!(error.message().contains(named), "{text}: {error}");
    }
}
