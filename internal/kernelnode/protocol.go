// SPDX-License-Identifier: Apache-2.0

package kernelnode

import "github.com/kpng-project/kpng/api"

// ProtocolOf returns the protocol with IANA's number. It returns UnknownProtocol for
// numbers of other protocols.
func ProtocolOf(number uint8) api.Protocol {
	for _, p := range [...]api.Protocol{api.TCP, api.UDP, api.SCTP} {
		if p.Number() == number {
			return p
		}
	}
	return api.UnknownProtocol
}
