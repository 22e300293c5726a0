// SPDX-License-Identifier: Apache-2.0

//go:build linux

package kernelnode

import (
	"github.com/kpng-project/kpng/backends"
)

// DefaultMark is the default of the option MasqueradeMark of the backends.
const DefaultMark = defaultMark

// CheckMasquerading checks options for masquerading.
func CheckMasquerading(mark uint32, podInterfaces []string, outsiders, podsKnown bool) error {
	o := backends.Options{MasqueradeMark: mark, PodInterfaces: podInterfaces, MasqueradeOutsiders: outsiders}
	return Complete(&o, podsKnown, "MasqueradeMark", "PodInterfaces", "MasqueradeOutsiders")
}
