//! Project commands: `cargo xtask <command>`.
use xtask::{model,windows::Windows,quality};
use qkv_candle::llama::*;
fn main() -> anyhow::Result<()> {
    let t=std::time::Instant::now();
    let p=model::obtain(None)?; eprintln!("obtain {:?}",t.elapsed());
    let mut g=Gguf::open(p)?; let tok=LlamaTokenizer::new(&g)?;
    let m=Llama::load(&mut g,Weights::F32,|_,_|{})?; eprintln!("load {:?}",t.elapsed());
    let n=std::env::args().nth(1).map_or(1,|x|x.parse().unwrap());
    let mut e=xtask::metrics::Score::default();
    for w in &Windows::standard(n)?.ids {
        let t=std::time::Instant::now();
        let r=quality::Reference::new(&m,w)?; e=e.plus(r.own_score());
        eprintln!("exact {:?} ppl {}",t.elapsed(), r.own_score().perplexity());
        let t=std::time::Instant::now();
        let s=r.score(&m,&mut r.prefix().clone())?; eprintln!("steps {:?} kl {:e} ppl {}",t.elapsed(),s.mean_kl(),s.perplexity());
    }
    eprintln!("ppl {}",e.perplexity());
    let mut g=Gguf::open(model::obtain(None)?)?;
    let m=Llama::load(&mut g,Weights::Quantized,|_,_|{})?;
    for ids in [tok.encode("hello,")?, tok.encode_chat("What is the capital of France?")?] {
    let r=generate(&m,&tok,&mut Exact::new(30),&ids,64,Sampling::greedy(),|s|eprint!("{s}"))?;
    eprintln!("\n{:?} {:?} {} tok/s",r.prefill,r.decode,r.tokens_per_second()); }
    Ok(())
}
