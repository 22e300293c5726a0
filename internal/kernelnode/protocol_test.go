// SPDX-License-Identifier: Apache-2.0

package kernelnode

import (
	"testing"

	"github.com/kpng-project/kpng/api"
)

func TestProtocolOf(t *testing.T) {
	for number, want := range map[uint8]api.Protocol{6: api.TCP, 17: api.UDP, 132: api.SCTP, 1: api.UnknownProtocol} {
		if got := ProtocolOf(number); got != want {
			t.Errorf("protocol %d is %s, want %s", number, got, want)
		}
	}
}
