// Special registers: their names and values.
#include <optional>

#include "machine.h"

namespace emu {
namespace {

struct SpecialName {
  char const* name;
  Sreg reg;
};
constexpr SpecialName kSpecials[] = {
    {"%tid.x", Sreg::TidX},
    {"%tid.y", Sreg::TidY},
    {"%tid.z", Sreg::TidZ},
    {"%ntid.x", Sreg::NtidX},
    {"%ntid.y", Sreg::NtidY},
    {"%ntid.z", Sreg::NtidZ},
    {"%ctaid.x", Sreg::CtaidX},
    {"%ctaid.y", Sreg::CtaidY},
    {"%ctaid.z", Sreg::CtaidZ},
    {"%nctaid.x", Sreg::NctaidX},
    {"%nctaid.y", Sreg::NctaidY},
    {"%nctaid.z", Sreg::NctaidZ},
    {"%laneid", Sreg::Laneid},
    {"%warpid", Sreg::Warpid},
    {"%nwarpid", Sreg::Nwarpid},
    {"%smid", Sreg::Smid},
    {"%nsmid", Sreg::Nsmid},
    {"%gridid", Sreg::Gridid},
    {"%lanemask_eq", Sreg::LanemaskEq},
    {"%lanemask_le", Sreg::LanemaskLe},
    {"%lanemask_lt", Sreg::LanemaskLt},
    {"%lanemask_ge", Sreg::LanemaskGe},
    {"%lanemask_gt", Sreg::LanemaskGt},
    {"%clusterid.x", Sreg::ClusteridX},
    {"%clusterid.y", Sreg::ClusteridY},
    {"%clusterid.z", Sreg::ClusteridZ},
    {"%nclusterid.x", Sreg::NclusteridX},
    {"%nclusterid.y", Sreg::NclusteridY},
    {"%nclusterid.z", Sreg::NclusteridZ},
    {"%cluster_ctaid.x", Sreg::ClusterCtaidX},
    {"%cluster_ctaid.y", Sreg::ClusterCtaidY},
    {"%cluster_ctaid.z", Sreg::ClusterCtaidZ},
    {"%cluster_nctaid.x", Sreg::ClusterNctaidX},
    {"%cluster_nctaid.y", Sreg::ClusterNctaidY},
    {"%cluster_nctaid.z", Sreg::ClusterNctaidZ},
    {"%cluster_ctarank", Sreg::ClusterCtarank},
    {"%cluster_nctarank", Sreg::ClusterNctarank},
    {"%is_explicit_cluster", Sreg::IsExplicitCluster},
    {"%dynamic_smem_size", Sreg::DynamicSmem},
    {"%total_smem_size", Sreg::TotalSmem},
    {"%clock", Sreg::Clock},
    {"%clock_hi", Sreg::Zero},
    {"%clock64", Sreg::Clock64},
    {"%globaltimer", Sreg::Globaltimer},
    {"%globaltimer_lo", Sreg::Clock},
    {"%envreg0", Sreg::Zero},
    {"%envreg1", Sreg::WorkspaceHigh},
    {"%envreg2", Sreg::WorkspaceLow},
};

}  // namespace

std::optional<Sreg> special_of(std::string_view name) {
  for (SpecialName const& special : kSpecials) {
    if (name == special.name) return special.reg;
  }
  return std::nullopt;
}

uint64_t special_register(Warp const& w, int lane, Sreg s) {
  Cta const& t = *w.cta;
  Cluster const& c = *t.cluster;
  Launch const& launch = *t.launch;
  uint32_t const thread = w.thread(lane), *const cluster = launch.cluster, *const block = launch.block,
                 size = cluster[0] * cluster[1] * cluster[2];
  uint32_t const tid[3] = {thread % block[0], thread / block[0] % block[1], thread / block[0] / block[1]};
  uint32_t const in[3] = {t.rank % cluster[0], t.rank / cluster[0] % cluster[1], t.rank / cluster[0] / cluster[1]};
  auto const axis = [&](Sreg from) { return int(s) - int(from); };
  switch (s) {
    case Sreg::TidX:
    case Sreg::TidY:
    case Sreg::TidZ:
      return tid[axis(Sreg::TidX)];
    case Sreg::NtidX:
    case Sreg::NtidY:
    case Sreg::NtidZ:
      return launch.block[axis(Sreg::NtidX)];
    case Sreg::CtaidX:
    case Sreg::CtaidY:
    case Sreg::CtaidZ:
      return t.id[axis(Sreg::CtaidX)];
    case Sreg::NctaidX:
    case Sreg::NctaidY:
    case Sreg::NctaidZ:
      return launch.grid[axis(Sreg::NctaidX)];
    case Sreg::Laneid:
      return lane;
    case Sreg::Warpid:
      return w.index;
    case Sreg::Nwarpid:
      return t.warps.size();
    case Sreg::Smid:
      return (c.index * size + t.rank) % 132;
    case Sreg::Nsmid:
      return 132;
    case Sreg::LanemaskEq:
      return 1u << lane;
    case Sreg::LanemaskLe:
      return (2ull << lane) - 1;
    case Sreg::LanemaskLt:
      return (1u << lane) - 1;
    case Sreg::LanemaskGe:
      return ~((1u << lane) - 1);
    case Sreg::LanemaskGt:
      return ~uint32_t((2ull << lane) - 1);
    case Sreg::ClusteridX:
    case Sreg::ClusteridY:
    case Sreg::ClusteridZ:
      return c.id[axis(Sreg::ClusteridX)];
    case Sreg::NclusteridX:
    case Sreg::NclusteridY:
    case Sreg::NclusteridZ:
      return launch.grid[axis(Sreg::NclusteridX)] / launch.cluster[axis(Sreg::NclusteridX)];
    case Sreg::ClusterCtaidX:
    case Sreg::ClusterCtaidY:
    case Sreg::ClusterCtaidZ:
      return in[axis(Sreg::ClusterCtaidX)];
    case Sreg::ClusterNctaidX:
    case Sreg::ClusterNctaidY:
    case Sreg::ClusterNctaidZ:
      return launch.cluster[axis(Sreg::ClusterNctaidX)];
    case Sreg::ClusterCtarank:
      return t.rank;
    case Sreg::ClusterNctarank:
      return size;
    case Sreg::IsExplicitCluster:
      return launch.explicit_cluster;
    case Sreg::WorkspaceHigh:
      return reinterpret_cast<uint64_t>(launch.workspace) >> 32;
    case Sreg::WorkspaceLow:
      return reinterpret_cast<uint64_t>(launch.workspace) & 0xffffffff;
    case Sreg::DynamicSmem:
      return launch.dynamic_shared;
    case Sreg::TotalSmem:
      return launch.shared_end;
    default:
      return 0;
  }
}

}  // namespace emu
